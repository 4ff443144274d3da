"""The attention function of linearized models: a kernel where the module has one, else softmax.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from linattn.hf._calls import inexpressible, read_mask, read_scale, refuse_options
from linattn.hf._kernels import kernel_of
from linattn.hf._mask import Mask, RefusedMask, build_whole_mask, last_keys
from linattn.hf.state_cache import StateLayer

NAME = "linattn"
LAYER = "linattn_layer"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    linattn_layer: StateLayer | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: transformers fixes its arguments and wants (B, Lq, H, Dv)."""
    mask = last_keys(attention_mask, key.shape[-2])
    scale = read_scale(query, scaling)
    kernel = kernel_of(module)
    if kernel is None:
        return attend_exactly(module, query, key, value, mask, scale, dropout, is_causal, options), None
    num_seen = 0 if linattn_layer is None else linattn_layer.num_tokens
    refuse_options(kernel.module_name, num_seen + key.shape[-2], dropout, options)
    key_mask, is_causal = read_mask(kernel.module_name, module, mask, is_causal)
    if linattn_layer is None:
        out: Tensor = kernel(query, key, value, scale=scale, key_mask=key_mask, is_causal=is_causal)
        return out.transpose(1, 2), None
    # A single query sees everything, causal or not.
    if not is_causal and query.shape[-2] > 1:
        raise ValueError(
            f"{kernel.module_name} lets queries see later keys, which a cache of states does not hold; pass "
            "use_cache=False"
        )
    out = linattn_layer.advance(kernel, query, key, value, scale=scale, key_mask=key_mask)
    return out.transpose(1, 2), None


def attend_exactly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    dropout: float,
    is_causal: bool | None,
    options: dict[str, Any],
) -> Tensor:
    """Softmax attention by transformers' SDPA function, which takes dropout, position biases and masks of pairs."""
    name = type(module).__name__
    found = inexpressible({**options, "position_bias": None})
    if found:
        raise ValueError(
            f"{name} asks for {', '.join(found)}, which transformers' SDPA attention, by which the softmax layers of a "
            "linearized model attend, does not give; restore_(model) gives its own attention back"
        )
    if isinstance(mask, RefusedMask) and mask.allowed is not None:
        pairs: Tensor | None = mask.allowed
        is_causal = False
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        pairs, is_causal = mask, False
    else:
        key_mask, is_causal = read_mask(name, module, mask, is_causal)
        pairs, is_causal = _pairs(key_mask, is_causal, query.shape[-2], key)
    bias = options.get("position_bias")
    out, _ = sdpa_attention_forward(
        module, query, key, value, pairs, dropout=dropout, scaling=scale, is_causal=is_causal, position_bias=bias
    )
    return out


def _pairs(key_mask: Tensor | None, is_causal: bool, num_queries: int, key: Tensor) -> tuple[Tensor | None, bool]:
    """The mask as SDPA takes it, (B or 1, 1, Lq, Lk), and whether its own flag does instead."""
    num_keys = key.shape[-2]
    if key_mask is None and (not is_causal or num_queries == num_keys):
        return None, is_causal
    # SDPA's flag is aligned top-left; a cache wants the last query level with the last key.
    pairs = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=key.device)
    pairs = pairs.tril(num_keys - num_queries) if is_causal else pairs
    return (pairs if key_mask is None else pairs & key_mask[:, None, None, :]), False


# On import, not on use: a linearized model that is read from a pickle names them too. Without a mask function of the
# same name, transformers would drop padding without a word.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, build_whole_mask)
