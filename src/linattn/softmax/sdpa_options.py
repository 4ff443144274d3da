"""Options of torch's scaled_dot_product_attention that attention here refuses, and what to do in their place."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor


def refuse_sdpa_options(attn_mask: object, dropout_p: float) -> NoReturn:
    """Say which options take the place of a mask of pairs, or what to do in place of dropout on the weights."""
    if attn_mask is not None:
        kind = f"{attn_mask.dtype} of shape {tuple(attn_mask.shape)}" if isinstance(attn_mask, Tensor) else attn_mask
        raise TypeError(
            f"attn_mask must be None, got {kind}: keys are masked here, not pairs; give padding as key_mask=, (B, Lk) "
            "bool with True = attend, a causal mask as is_causal=True (calls with a state are causal), a bias on keys "
            "as key_bias=, (B, Hkv or 1, Lk); for other masks call torch's scaled_dot_product_attention"
        )
    raise ValueError(
        f"dropout_p must be 0, got {dropout_p}; no weights are stored that could be dropped: drop outputs, with "
        "torch.nn.functional.dropout"
    )
