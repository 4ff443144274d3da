"""What a model asks of its attention mask, reduced to what a kernel can honour or refused by name.

Letters: B batch, L tokens (Lq, Lk).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask


@dataclass(frozen=True, eq=False)
class PlainMask:
    """A structure (a window, say) that is a plain mask at these lengths: the causal triangle or the full square."""

    key_mask: Tensor | None  # (B, Lk) bool, True = attend
    is_causal: bool


@dataclass(frozen=True, eq=False)
class RefusedMask:
    """A mask no kernel can honour; an error only where a layer uses it: models build masks that no layer reads."""

    reason: str
    # (B, 1, Lq, Lk) bool, the mask itself, for softmax; None where it was not worked out.
    allowed: Tensor | None = None


Mask = Tensor | PlainMask | RefusedMask | None


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **asked: Any,
) -> Mask:
    """The mask function that goes with the attention function; transformers passes all of it by keyword.

    Key padding as (B, Lk) bool, None where there is none; a `mask_function` of another structure than plain causal or
    bidirectional is compared with these position by position, in O(B Lq Lk).
    """
    mask_function = asked.get("mask_function", causal_mask_function)
    key_mask = None if attention_mask is None else attention_mask[:, -kv_length:]
    if int(kv_offset + kv_length) != int(q_offset + q_length) and mask_function is not bidirectional_mask_function:
        return RefusedMask("keys beyond the last query (the empty slots of a static cache)")
    if key_mask is not None and key_mask.shape[-1] != kv_length:
        return RefusedMask(f"an attention mask over {key_mask.shape[-1]} of {kv_length} keys")
    if key_mask is not None and bool(key_mask.all()):
        key_mask = None
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return key_mask
    allowed: Any = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        allow_is_causal_skip=False,
        use_vmap=asked.get("use_vmap", False),
        device=asked.get("device", "cpu"),
    )
    if bool(allowed.all()):
        return PlainMask(key_mask, is_causal=False)
    ones = torch.ones(q_length, kv_length, dtype=torch.bool, device=allowed.device)
    if bool((allowed == ones.tril(kv_length - q_length)).all()):
        return PlainMask(key_mask, is_causal=True)
    return RefusedMask(
        "a mask that is neither causal nor full (a sliding window, chunks, packed sequences or a prefix)",
        allowed if key_mask is None else allowed & key_mask[:, None, None, :],
    )


def build_whole_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **asked: Any
) -> Mask:
    """`build_mask` over all tokens since the first, whichever layer's cache the model asked for its lengths.

    A model makes one mask for layers that keep different numbers of keys (all of them, a window, or none beside a
    state); `last_keys` gives each the columns it needs.
    """
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
