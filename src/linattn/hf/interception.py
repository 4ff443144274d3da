"""Route every attention call of a transformers model to a function, or record them; letters as in hf/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import RLock, _DummyThread, current_thread
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from linattn.hf._attention_modules import attention_modules, implementations, parts_of, restore, switch_to, unwrapped
from linattn.hf._calls import AnyMask, InterfaceCall, ask_mask, by_token, refuse_weights
from linattn.methods.measures import uniform_average
from linattn.softmax import softmax_attention

NAME = "linattn_intercept"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call of one forward pass, positions already applied to queries and keys.

    Attributes:
        layer: the number of the call in its forward pass, from 0, sliding windows included; in most models the layer.
        module_name: qualified name of the attention module in the model.
        query: (B, H, Lq, D).
        key: (B, Hkv, Lk, D), a cache's keys included.
        value: (B, Hkv, Lk, Dv).
        key_mask: (B, Lk) bool, True = attend; None when every key may be attended to.
        is_causal: True if query i sees only the keys up to its own, the last query being level with the last key.
        scale: factor of q·k in the exponent, as the model passes it; not always D**-0.5.
    """

    layer: int
    module_name: str
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    is_causal: bool
    scale: float

    def softmax(self) -> Tensor:
        """Softmax attention, (B, H, Lq, Dv): what the model itself computes."""
        q, k, v, mask = self.query, self.key, self.value, self.key_mask
        return softmax_attention(q, k, v, key_mask=mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=True)

    def uniform(self) -> Tensor:
        """The mean of the values that each query may attend to, (B, H, Lq, Dv)."""
        sizes = {"num_heads": self.query.shape[1], "num_queries": self.query.shape[2]}
        return uniform_average(self.value, **sizes, key_mask=self.key_mask, is_causal=self.is_causal)


Handler = Callable[[AttentionCall], Tensor]


class _Interception:
    """The handler of one model, and what calls its current forward pass has made."""

    def __init__(self, handler: Handler, model: PreTrainedModel) -> None:
        self.handler = handler
        self.module_names = {module: name for name, module in model.named_modules()}
        self.num_calls = self.num_windowed = 0

    def start(self, model: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model: a new pass begins."""
        self.num_calls = self.num_windowed = 0

    def finish(self, model: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model: a pass without calls means that the handler was passed over."""
        if self.num_calls == 0:
            raise RuntimeError(
                f"{type(model).__name__} ran without one call of its attention function: its layers attend by other "
                "means and cannot be intercepted; choose a model whose layers use transformers' AttentionInterface"
            )
        if self.num_windowed == self.num_calls:
            raise ValueError(
                f"every attention layer of {type(model).__name__} has a sliding window that this text is longer than, "
                "so that there is no call for a kernel to answer; give a text that fits in the window"
            )

    def answer(self, call: InterfaceCall) -> Tensor:
        """The handler's output, (B, Lq, H, Dv)."""
        name, query, value = self.module_names[call.module], call.query, call.value
        number, num_keys = self.num_calls, call.key.shape[-2]
        self.num_calls += 1
        if call.hides_keys(num_keys):
            self.num_windowed += 1
            return call.by_former()[0]
        mask = call.read_mask(name, num_keys)
        out = self.handler(AttentionCall(number, name, query, call.key, value, *mask, call.scale))
        wanted = (*query.shape[:-1], value.shape[-1])
        returned = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        if returned != wanted:
            raise ValueError(f"the handler returned {returned} for {name}; it must return (B, H, Lq, Dv) = {wanted}")
        return by_token(out)


Answer = Callable[[InterfaceCall], Tensor]

SWITCHING = RLock()
"""Held by a thread that switches a model, or learns from passes what its layers ask for."""
# Of each module and configuration of an intercepted model, by place in memory: what answers, and what did before.
_STANDING: dict[int, tuple[Answer, str | None]] = {}
# What answers in the blocks that this thread, or task, is in.
_ENTERED: ContextVar[tuple[Answer, ...]] = ContextVar("entered", default=())


def is_near(answer: Answer) -> bool:
    """True in the thread, or task, whose block this answers in, and in autograd's own, which compute layers again."""
    is_own = torch.compiler.is_compiling() or answer in _ENTERED.get()
    return is_own or (isinstance(current_thread(), _DummyThread) and torch._C._current_graph_task_id() >= 0)


@contextmanager
def answering(model: PreTrainedModel, answer: Answer) -> Iterator[None]:
    """Every attention call of a model, in this thread, answered by a function, to (B, Lq, H, Dv), in the block."""
    with ExitStack() as block:
        with SWITCHING:
            if any(id(module) in _STANDING for module in model.modules()):
                raise ValueError(f"{type(model).__name__} is already intercepted; leave that block before another")
            # On every use: a registry may have been cleared, and without a mask function padding would be dropped.
            AttentionInterface.register(NAME, _attend)
            AttentionMaskInterface.register(NAME, _ask)
            # Before the switch and until after its end: other threads may be calling the model.
            held = implementations(model)
            _STANDING.update({id(part): (answer, name) for part, name in held})
            block.callback(lambda: [_STANDING.pop(id(part), None) for part, _ in held])
            block.callback(restore, switch_to(model, NAME))
        block.callback(_ENTERED.reset, _ENTERED.set((*_ENTERED.get(), answer)))
        yield


@contextmanager
def intercept(model: PreTrainedModel, handler: Handler) -> Iterator[None]:
    """Answer every attention call of a model by a function, until the block is left.

    out = handler(AttentionCall(q, k, v, …)) in place of softmax(scale · q·k) v, in every layer but those with a sliding
    window that the text is longer than: these attend by softmax within their window, as the model itself does. Calls
    that other threads make meanwhile attend as before, to the bit.

    Cost: the handler's own.

    Args:
        model: a transformers model whose layers use AttentionInterface. Call the model itself, not a part of it: its
            forward pass is what numbers the calls.
        handler: takes an `AttentionCall`, returns (B, H, Lq, Dv), the layout of `linattn.softmax_attention`.

    Raises:
        TypeError: if `model` is no transformers model.
        ValueError: if the model's layers ignore AttentionInterface, or the model is already intercepted; from the
            forward pass, if a call asks for what a feature map cannot express (a position bias, soft-capped logits,
            attention sinks, packed sequences, a 4-D mask, dropout, returned weights), every layer has a sliding window
            that hides keys, or the handler's output has another shape.
        RuntimeError: from the forward pass, if it ends without one attention call.

    Example:
        >>> import torch, linattn
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4)
        >>> model = BertModel(BertConfig(**sizes)).eval()
        >>> seen = []
        >>> def exact(call):
        ...     seen.append((call.layer, tuple(call.query.shape)))
        ...     return linattn.softmax_attention(call.query, call.key, call.value, scale=call.scale)
        >>> with intercept(model, exact):
        ...     _ = model(input_ids=torch.tensor([[1, 2, 3]]))
        >>> seen
        [(0, (1, 2, 3, 2)), (1, (1, 2, 3, 2))]

    Source: transformers' documentation, "Attention interface".
    """
    unwrapped(model)
    model = getattr(model, "_orig_mod", model)
    interception = _Interception(handler, model)

    def near(hook: Callable[..., None]) -> Callable[..., None]:
        """A hook of this thread's passes; others may meet it half registered, without keywords."""
        return lambda part, *rest: hook(part, *rest) if is_near(interception.answer) else None

    with answering(model, interception.answer), ExitStack() as hooks:
        for part in parts_of(model):
            hooks.enter_context(part.register_forward_pre_hook(near(refuse_weights), with_kwargs=True))
        hooks.enter_context(model.register_forward_pre_hook(near(interception.start)))
        hooks.enter_context(model.register_forward_hook(near(interception.finish)))
        yield


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: AnyMask, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: transformers passes the options by keyword and wants (B, Lq, H, Dv)."""
    answer, former = _STANDING.get(id(module)) or (None, _standing(getattr(module, "config", None))[1])
    if answer is None and former == NAME:
        raise RuntimeError(f"{type(module).__name__} attends by {NAME!r} outside `intercept`; use `intercept`")
    call = InterfaceCall(module, query, key, value, attention_mask, options, former)
    return (answer(call), None) if answer is not None and is_near(answer) else call.by_former()


def _ask(*sizes: Any, **options: Any) -> Any:
    """The registered mask function: another thread's masks are those of before, which both functions can read."""
    answer, former = _standing(options.get("config"))
    if former == NAME or (answer is not None and is_near(answer)):
        return ask_mask(*sizes, **options)
    return ALL_MASK_ATTENTION_FUNCTIONS.get(former, lambda *_, **__: None)(*sizes, **options)


def _standing(config: Any) -> tuple[Answer | None, str | None]:
    """The answer by a configuration, and the implementation before, which is back where the block was left since."""
    return _STANDING.get(id(config)) or (None, getattr(config, "_attn_implementation", NAME))


class Capture(NamedTuple):
    """Calls and output of one forward pass, as `capture` records them.

    Attributes:
        calls: one per layer, in the order of the forward pass; tensors detached, contiguous and the caller's own.
        output: the model's first output under its own attention; (B, L, width) last hidden states for base models.
        windowed: names of the attention modules whose sliding window the text is longer than, in order: softmax over
            all keys is not what they compute, and they have no call.
    """

    calls: tuple[AttentionCall, ...]
    output: Tensor
    windowed: tuple[str, ...]


def capture(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Capture:
    """The queries, keys and values of every layer of one forward pass that attends to all keys.

    softmax(scale · q·k) v, computed from what was recorded, must give the model's own output: this is checked, so that
    a misread mask, scale or position is an error here and not a wrong figure later.

    Cost: two forward passes without gradients; memory for q, k, v of all layers.

    Args:
        model: a transformers model that `intercept` accepts, in evaluation mode.
        inputs: its keyword arguments, such as a tokenizer returns.

    Raises:
        ValueError: as `intercept`; also if the model is in training mode.
        RuntimeError: if exact attention on the recorded tensors differs from the model's own output by more than half
            the digits of its dtype, relative to the output's norm.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4)
        >>> recorded = capture(BertModel(BertConfig(**sizes)).eval(), {"input_ids": torch.tensor([[1, 2, 3]])})
        >>> [tuple(call.key.shape) for call in recorded.calls], tuple(recorded.output.shape)
        ([(1, 2, 3, 2), (1, 2, 3, 2)], (1, 3, 4))

    Source: transformers' documentation, "Attention interface".
    """
    unwrapped(model)
    model = getattr(model, "_orig_mod", model)
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode; call model.eval() first, or dropout is recorded")
    with torch.no_grad():
        output: Tensor = model(**inputs)[0]
    calls, rebuilt = recorded(model, inputs)
    of_output = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    padding, exact = inputs.get(of_output), output
    # Padded positions, where the output has such, say nothing.
    if padding is not None and exact.shape[: padding.ndim] == padding.shape:
        exact, rebuilt = exact[padding.bool()], rebuilt[padding.bool()]
    if not exact.isfinite().all():
        raise RuntimeError(
            f"{type(model).__name__} gives NaN or infinity, as such weights do; give another model, or dtype"
        )
    difference = float((rebuilt.double() - exact.double()).norm() / exact.double().norm())
    allowed = torch.finfo(exact.dtype).eps ** 0.5
    if not difference <= allowed:
        raise RuntimeError(
            f"exact attention on the recorded queries, keys and values of {type(model).__name__} differs from its own "
            f"output by {difference:.1e} of its norm, more than {allowed:.1e}: its attention is more than "
            "softmax(scale · q·k) v, and no figure measured on it would be right"
        )
    names = {call.module_name for call in calls}
    windows = (part.name for part in attention_modules(model) if part.window is not None)
    return Capture(tuple(calls), output, tuple(name for name in windows if name not in names))


def recorded(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> tuple[list[AttentionCall], Tensor]:
    """The calls of `capture`, and the output of a pass in which they are answered exactly; nothing is checked."""
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> Tensor:
        """Keep the call, answer exactly."""
        tensors = {name: getattr(call, name).detach().contiguous().clone() for name in ("query", "key", "value")}
        calls.append(replace(call, **tensors))
        return call.softmax()

    with torch.no_grad(), intercept(model, record):
        return calls, model(**inputs)[0]
