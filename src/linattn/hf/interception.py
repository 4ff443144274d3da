"""Route every attention call of a transformers model to a function of one's own.

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

from linattn.hf._mask import Mask, PlainMask, RefusedMask, build_mask

_NAME = "linattn_intercept"

# Keywords of transformers' attention functions that change the weights in a way φ(q)·φ(k) cannot express.
_INEXPRESSIBLE = {
    "position_bias": "a position bias added to the logits",
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "indices": "a sparse choice of keys",
    "block_indices": "a sparse choice of keys",
}


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
        is_causal: whether query i sees only the keys up to its own, the last query being level with the last key.
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


_ACTIVE: WeakKeyDictionary[nn.Module, _Interception] = WeakKeyDictionary()


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
    if model in _ACTIVE:
        raise ValueError(
            f"{type(model).__name__} is already intercepted; leave the first block before entering another"
        )
    AttentionInterface.register(_NAME, _attend)
    # Without a mask function of the same name, padding would be dropped without a word.
    AttentionMaskInterface.register(_NAME, build_mask)
    interception = _Interception(handler, model)
    configs = {id(config): config for config in _configs(model)}.values()
    previous = [(config, config._attn_implementation_internal) for config in configs]
    hooks = [model.register_forward_pre_hook(interception.start), model.register_forward_hook(interception.finish)]
    try:
        model.set_attn_implementation(_NAME)
        _check_taken(model)
        _ACTIVE.update(dict.fromkeys(interception.module_names, interception))
        yield
    finally:
        for module in interception.module_names:
            _ACTIVE.pop(module, None)
        for hook in hooks:
            hook.remove()
        for config, implementation in previous:
            config._attn_implementation_internal = implementation


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Every configuration that names an attention implementation for some part of the model."""
    pending = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while pending:
        config = pending.pop()
        yield config
        parts = (getattr(config, name) for name in config.sub_configs)
        pending.extend(part for part in parts if part is not None)


def _check_taken(model: PreTrainedModel) -> None:
    """Refuse models some part of which kept its own attention: transformers only logs a warning."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    deaf = sorted({type(part).__name__ for part in parts if part.config._attn_implementation != _NAME})
    if deaf:
        raise ValueError(
            f"{', '.join(deaf)} does not take its attention from transformers' AttentionInterface and cannot be "
            "intercepted; choose a model that does (BERT, ModernBERT, GPT-2, Llama, Qwen and most newer ones)"
        )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: transformers fixes its arguments and wants (B, Lq, H, Dv)."""
    interception = _ACTIVE.get(module)
    if interception is None:
        raise RuntimeError(f"{type(module).__name__} attends by {_NAME!r} outside `intercept`; use `intercept`")
    name = interception.module_names[module]
    _refuse_options(name, key.shape[-2], dropout, options)
    key_mask, is_causal = _read_mask(name, module, attention_mask, is_causal)
    # SDPA's own default, which a model that passes none relies on.
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(interception.num_calls, name, query, key, value, key_mask, is_causal, scale)
    interception.num_calls += 1
    out = interception.handler(call)
    wanted = (*query.shape[:-1], value.shape[-1])
    if tuple(out.shape) != wanted:
        raise ValueError(
            f"the handler returned {tuple(out.shape)} for {name}; it must return (B, H, Lq, Dv) = {wanted}"
        )
    return out.transpose(1, 2), None


def _refuse_options(name: str, num_keys: int, dropout: float, options: dict[str, Any]) -> None:
    """Refuse what the call asks for beyond q, k, v, a padding mask and causality."""
    found = [words for option, words in _INEXPRESSIBLE.items() if options.get(option) is not None]
    window = options.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < num_keys):
        found.append(f"a sliding window of {window} over {num_keys} keys")
    if dropout:
        found.append(f"dropout of {dropout} on the weights (put the model into evaluation mode)")
    if options.get("output_attentions"):
        found.append("the weights themselves (output_attentions=True)")
    if found:
        raise ValueError(f"{name} asks for {', '.join(dict.fromkeys(found))}, which a kernel φ(q)·φ(k) cannot express")


def _read_mask(name: str, module: nn.Module, mask: Mask, is_causal: bool | None) -> tuple[Tensor | None, bool]:
    """Key padding and causality of a call."""
    if isinstance(mask, RefusedMask):
        raise ValueError(f"{name} asks for {mask.reason}, which a kernel φ(q)·φ(k) cannot express")
    if isinstance(mask, PlainMask):
        return mask.key_mask, mask.is_causal
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"{name} was given a {mask.ndim}-D mask; pass key padding only, as a (B, Lk) mask")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
        if is_causal is None:
            raise ValueError(
                f"{name} ({type(module).__name__}) does not say whether it is causal; it cannot be intercepted"
            )
    return None if mask is None else mask.bool(), bool(is_causal)
