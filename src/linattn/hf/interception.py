"""Route every attention call of a transformers model to a function.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from linattn.attention import softmax_attention
from linattn.hf._calls import InterfaceCall, refuse_weights
from linattn.hf._implementation import hook_parts, restore, switch_to
from linattn.hf._mask import Mask, build_mask
from linattn.planning.measures import uniform_average

NAME = "linattn_intercept"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call of one forward pass, positions already applied to queries and keys.

    Attributes:
        layer: the number of the call in its forward pass, from 0; for most models the layer.
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
        return softmax_attention(
            self.query,
            self.key,
            self.value,
            key_mask=self.key_mask,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=True,
        )

    def uniform(self) -> Tensor:
        """The mean of the values that each query may attend to, (B, H, Lq, Dv)."""
        _, num_heads, num_queries, _ = self.query.shape
        return uniform_average(
            self.value, num_heads=num_heads, num_queries=num_queries, key_mask=self.key_mask, is_causal=self.is_causal
        )


Handler = Callable[[AttentionCall], Tensor]


class _Interception:
    """The handler of one model, and the number of calls its current forward pass has made."""

    def __init__(self, handler: Handler, model: PreTrainedModel) -> None:
        self.handler = handler
        self.module_names = {module: name for name, module in model.named_modules()}
        self.num_calls = 0

    def start(self, model: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model: a new pass begins."""
        self.num_calls = 0

    def finish(self, model: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model: a pass without calls means that the handler was passed over."""
        if self.num_calls == 0:
            raise RuntimeError(
                f"{type(model).__name__} ran without one call of its attention function: its layers compute attention "
                "by other means and cannot be intercepted; choose a model whose layers use transformers' "
                "AttentionInterface"
            )

    def answer(self, call: InterfaceCall) -> Tensor:
        """The handler's output, (B, Lq, H, Dv)."""
        name, query, value = self.module_names[call.module], call.query, call.value
        call.refuse_options(name, call.key.shape[-2])
        read = AttentionCall(self.num_calls, name, query, call.key, value, *call.read_mask(name), call.scale)
        self.num_calls += 1
        out = self.handler(read)
        wanted = (*query.shape[:-1], value.shape[-1])
        if tuple(out.shape) != wanted:
            raise ValueError(
                f"the handler returned {tuple(out.shape)} for {name}; it must return (B, H, Lq, Dv) = {wanted}"
            )
        return out.transpose(1, 2)


_ANSWERS: WeakKeyDictionary[nn.Module, Callable[[InterfaceCall], Tensor]] = WeakKeyDictionary()


@contextmanager
def answering(model: PreTrainedModel, answer: Callable[[InterfaceCall], Tensor]) -> Iterator[None]:
    """Every attention call of a model answered by a function, to (B, Lq, H, Dv), until the block is left."""
    if model in _ANSWERS:
        raise ValueError(
            f"{type(model).__name__} is already intercepted; leave the first block before entering another"
        )
    # On every use: a registry may have been cleared. Without a mask function of the same name, padding would be dropped
    # without a word.
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, build_mask)
    former, modules = switch_to(model, NAME), list(model.modules())
    try:
        _ANSWERS.update(dict.fromkeys(modules, answer))
        yield
    finally:
        for module in modules:
            _ANSWERS.pop(module, None)
        restore(former)


@contextmanager
def intercept(model: PreTrainedModel, handler: Handler) -> Iterator[None]:
    """Answer every attention call of a model by a function, until the block is left.

    out = handler(AttentionCall(q, k, v, …)) in place of softmax(scale · q·k) v, in every layer.

    Cost: the handler's own. The model's former implementation returns when the block is left, also by an error.

    Args:
        model: a transformers model whose layers use AttentionInterface. Call the model itself, not a part of it: its
            forward pass is what numbers the calls.
        handler: takes an `AttentionCall`, returns (B, H, Lq, Dv), the layout of `linattn.softmax_attention`.

    Returns:
        A context manager that yields nothing.

    Raises:
        ValueError: if the model's layers ignore AttentionInterface, or the model is already intercepted; from the
            forward pass, if a call asks for what a kernel cannot express (a position bias, soft-capped logits,
            attention sinks, an active sliding window, packed sequences, a 4-D mask, dropout, returned weights) or the
            handler's output has another shape.
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
    interception = _Interception(handler, model)
    with answering(model, interception.answer):
        hooks = [
            *hook_parts(model, refuse_weights),
            model.register_forward_pre_hook(interception.start),
            model.register_forward_hook(interception.finish),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """The registered attention function: transformers passes the options by keyword and wants (B, Lq, H, Dv)."""
    answer = _ANSWERS.get(module)
    if answer is None:
        raise RuntimeError(f"{type(module).__name__} attends by {NAME!r} outside `intercept`; use `intercept`")
    return answer(InterfaceCall(module, query, key, value, attention_mask, options)), None
