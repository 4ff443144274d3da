"""What transformers passes to an attention function, read or refused by name.

Letters: B batch, L tokens (Lq, Lk), D head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from linattn.hf._mask import Mask, PlainMask, RefusedMask

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


def refuse_options(name: str, num_keys: int, dropout: float, options: dict[str, Any]) -> None:
    """Refuse what the call asks for beyond q, k, v, a padding mask and causality."""
    found = inexpressible(options)
    window = options.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < num_keys):
        found.append(f"a sliding window of {window} over {num_keys} keys")
    if dropout:
        found.append(
            f"dropout of {dropout} on the weights (call model.eval(), or load the model with attention dropout 0)"
        )
    if found:
        raise ValueError(_refusal(name, ", ".join(dict.fromkeys(found))))


def inexpressible(options: dict[str, Any]) -> list[str]:
    """In words, the options that change the weights of single pairs."""
    return [words for option, words in _INEXPRESSIBLE.items() if options.get(option) is not None]


def refuse_weights(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let every part of a model refuse to return weights: not every family tells its attention function of the wish."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return [part.register_forward_pre_hook(_refuse_returned, with_kwargs=True) for part in parts]


def _refuse_returned(part: Any, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook: transformers would collect nothing from layer to layer, and return it."""
    asked = options.get("output_attentions")
    if part.config.output_attentions if asked is None else asked:
        raise ValueError(
            f"{type(part).__name__} is asked for the weights themselves (output_attentions=True, in the call or in its "
            "config), and its attention returns none as long as linattn has replaced it; call it without them"
        )


def read_mask(name: str, module: nn.Module, mask: Mask, is_causal: bool | None) -> tuple[Tensor | None, bool]:
    """Key padding and causality of a call."""
    if isinstance(mask, RefusedMask):
        raise ValueError(_refusal(name, mask.reason))
    if isinstance(mask, PlainMask):
        return mask.key_mask, mask.is_causal
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"{name} was given a {mask.ndim}-D mask; pass key padding only, as a (B, Lk) mask")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
        if is_causal is None:
            raise ValueError(
                f"{name} ({type(module).__name__}) does not say whether it is causal; its attention cannot be replaced"
            )
    return None if mask is None else mask.bool(), bool(is_causal)


def _refusal(name: str, asked: str) -> str:
    """What a kernel says to what it cannot do."""
    return (
        f"{name} asks for {asked}, which a kernel φ(q)·φ(k) cannot express: call the model without it, or leave this "
        "layer its softmax"
    )


def read_scale(query: Tensor, scaling: float | None) -> float:
    """The factor of q·k: as passed, else SDPA's own default, on which a model that passes none relies."""
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)
