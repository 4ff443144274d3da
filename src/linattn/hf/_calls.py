"""One call of transformers' attention interface and its mask: read, answered by softmax, or refused by name.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

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
class PlainMask:
    """A structure (a window, say) that is a plain mask at these lengths: the causal triangle or the full square."""

    key_mask: Tensor | None  # (B, Lk) bool, True = attend
    is_causal: bool


@dataclass(frozen=True, eq=False)
class RefusedMask:
    """A mask that no feature map can take; an error only where a layer reads it."""

    reason: str
    # (B, 1, Lq, Lk) bool, the mask itself, for softmax; None where it was not worked out.
    allowed: Tensor | None = None


Mask = Tensor | PlainMask | RefusedMask | None


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """What transformers passes to an attention function; the options are its keywords: scaling, dropout, is_causal…"""

    module: nn.Module
    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        """The factor of q·k: as passed, else SDPA's own default, on which a model that passes none relies."""
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    def hides_keys(self, num_keys: int) -> bool:
        """True if the call asks for a sliding window that so many keys do not fit in."""
        window = self.options.get("sliding_window")
        return window is not None and (not isinstance(window, int) or window < num_keys)

    def refuse_options(self, name: str, num_keys: int) -> None:
        """Refuse what the call asks for beyond q, k, v, a padding mask and causality."""
        found, dropout = _inexpressible(self.options), self.options.get("dropout")
        if self.hides_keys(num_keys):
            found.append(f"a sliding window of {self.options['sliding_window']} over {num_keys} keys")
        if dropout:
            found.append(
                f"dropout of {dropout} on the weights (call model.eval(), or load the model with attention dropout 0)"
            )
        if found:
            raise ValueError(_refusal(name, ", ".join(dict.fromkeys(found))))

    def read_mask(self, name: str) -> tuple[Tensor | None, bool]:
        """Key padding, (B, Lk) bool or None, and causality."""
        mask, is_causal = self.mask, self.options.get("is_causal")
        if isinstance(mask, RefusedMask):
            raise ValueError(_refusal(name, mask.reason))
        if isinstance(mask, PlainMask):
            return mask.key_mask, mask.is_causal
        if mask is not None and mask.ndim != 2:
            raise ValueError(f"{name} was given a {mask.ndim}-D mask; pass key padding only, as a (B, Lk) mask")
        if is_causal is None:
            is_causal = getattr(self.module, "is_causal", None)
        if is_causal is None:
            kind = type(self.module).__name__
            raise ValueError(f"{name} ({kind}) does not say whether it is causal; its attention cannot be replaced")
        return None if mask is None else mask.bool(), bool(is_causal)

    def by_softmax(self) -> Tensor:
        """(B, Lq, H, Dv) by transformers' SDPA function, which takes dropout, position biases and masks of pairs."""
        name = type(self.module).__name__
        found = _inexpressible({**self.options, "position_bias": None})
        if found:
            raise ValueError(
                f"{name} asks for {', '.join(found)}, which transformers' SDPA attention, by which the softmax layers "
                "of a linearized model attend, does not give; restore_(model) gives its own attention back"
            )
        pairs: Any = self.mask.allowed if isinstance(self.mask, RefusedMask) else self.mask
        is_causal = False
        if not isinstance(pairs, Tensor) or pairs.ndim != 4:
            pairs, is_causal = self._pairs(*self.read_mask(name))
        passed = {"dropout": self.options.get("dropout", 0.0), "position_bias": self.options.get("position_bias")}
        tensors = self.query, self.key, self.value
        out, _ = sdpa_attention_forward(self.module, *tensors, pairs, scaling=self.scale, is_causal=is_causal, **passed)
        return out

    def _pairs(self, key_mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
        """The mask as SDPA takes it, (B or 1, 1, Lq, Lk), and True if its own flag does instead."""
        num_queries, num_keys = self.query.shape[-2], self.key.shape[-2]
        if key_mask is None and (not is_causal or num_queries == num_keys):
            return None, is_causal
        # SDPA's flag is aligned top-left; a cache wants the last query level with the last key.
        pairs = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=self.key.device)
        pairs = pairs.tril(num_keys - num_queries) if is_causal else pairs
        return (pairs if key_mask is None else pairs & key_mask[:, None, None, :]), False


def refuse_weights(part: Any, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook of models: returned weights, which not every family tells its attention function of."""
    asked = options.get("output_attentions")
    if part.config.output_attentions if asked is None else asked:
        raise ValueError(
            f"{type(part).__name__} is asked for the weights themselves (output_attentions=True, in the call or in its "
            "config), and its attention returns none as long as linattn has replaced it; call it without them"
        )


def _inexpressible(options: dict[str, Any]) -> list[str]:
    """In words, the options that change the weights of single pairs."""
    return [words for option, words in _INEXPRESSIBLE.items() if options.get(option) is not None]


def _refusal(name: str, asked: str) -> str:
    """The error for what φ(q)·φ(k) cannot express."""
    return (
        f"{name} asks for {asked}, which a kernel φ(q)·φ(k) cannot express: call the model without it, or leave this "
        "layer its softmax"
    )


def build_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **asked: Any
) -> Mask:
    """The mask of keywords that transformers passes: key padding as (B, Lk) bool, or None where there is none.

    A `mask_function` that is neither causal nor bidirectional is compared with these by position, in O(B Lq Lk).
    """
    mask_function = asked.get("mask_function", causal_mask_function)
    key_mask: Tensor | None = asked.get("attention_mask")
    key_mask = None if key_mask is None else key_mask[:, -kv_length:]
    if int(kv_offset + kv_length) != int(q_offset + q_length) and mask_function is not bidirectional_mask_function:
        return RefusedMask("keys beyond the last query (the empty slots of a static cache)")
    if key_mask is not None and key_mask.shape[-1] != kv_length:
        return RefusedMask(f"an attention mask over {key_mask.shape[-1]} of {kv_length} keys")
    if key_mask is not None and bool(key_mask.all()):
        key_mask = None
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return key_mask
    options = {"use_vmap": asked.get("use_vmap", False), "device": asked.get("device", "cpu")}
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    return _reduce_mask(sdpa_mask(*sizes, mask_function, allow_is_causal_skip=False, **options), key_mask)


def _reduce_mask(allowed: Any, key_mask: Tensor | None) -> Mask:
    """A mask of pairs, (B, 1, Lq, Lk) bool without the padding, as a plain one where it is, else refused."""
    if bool(allowed.all()):
        return PlainMask(key_mask, is_causal=False)
    num_queries, num_keys = allowed.shape[-2:]
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=allowed.device)
    if bool((allowed == ones.tril(num_keys - num_queries)).all()):
        return PlainMask(key_mask, is_causal=True)
    return RefusedMask(
        "a mask that is neither causal nor full (a sliding window, chunks, packed sequences or a prefix)",
        allowed if key_mask is None else allowed & key_mask[:, None, None, :],
    )


def build_whole_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **asked: Any
) -> Mask:
    """`build_mask` over all tokens since the first, for layers that keep different numbers of keys; see `last_keys`.

    The layers of a local mask all keep the same ones, and a mask over all tokens would grow with the text.
    """
    if asked.get("local_size") is not None:
        return build_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **asked)
    return build_mask(batch_size, q_length, kv_offset + kv_length, q_offset, 0, **asked)


def last_keys(mask: Mask, num_keys: int) -> Mask:
    """A mask's columns for the last keys."""
    if isinstance(mask, Tensor):
        return mask[..., -num_keys:]
    if isinstance(mask, PlainMask) and mask.key_mask is not None:
        return replace(mask, key_mask=mask.key_mask[:, -num_keys:])
    if isinstance(mask, RefusedMask) and mask.allowed is not None:
        return replace(mask, allowed=mask.allowed[..., -num_keys:])
    return mask
