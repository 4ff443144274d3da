"""Means over tokens that fitted maps are built on.

Letters: B batch, H heads, Hkv key/value heads, G = H/Hkv query heads of a group, L tokens (Lq, Lk), D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.softmax.dense import check_dense


def check_fit(query: Tensor, key: Tensor, head_dim: int) -> None:
    """Refuse anything but query (B, H, Lq, D) and key (B, Hkv, Lk, D) with H a multiple of Hkv, finite, not empty."""
    check_dense(query=query, key=key)
    fits = query.dim() == key.dim() == 4 and query.shape[-1] == key.shape[-1] == head_dim
    fits = fits and query.numel() > 0 and key.numel() > 0
    if not fits or query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"fit wants query (B, H, Lq, {head_dim}) and key (B, Hkv, Lk, {head_dim}), not empty, H a multiple of Hkv; "
            f"got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if not bool(query.isfinite().all() and key.isfinite().all()):
        raise ValueError("fit got values that are not finite; remove padded positions before fitting")


def group_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, Lq, D) -> (B, Hkv, G·Lq, D): the queries that read each key/value head, group by group."""
    batch, num_heads, length, dim = query.shape
    return query.reshape(batch, num_kv_heads, num_heads // num_kv_heads * length, dim)


def by_head(mask: Tensor) -> Tensor:
    """A mask of tokens, (B, L) or (B, H or 1, L), for each head: (B, H or 1, L)."""
    return mask if mask.ndim == 3 else mask.unsqueeze(1)


def call_queries(query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The queries of a call, grouped as above, and which of them count, (B, Hkv or 1, G·Lq).

    In self-attention a masked position is padding among the queries too.
    """
    grouped = group_queries(query, key.shape[1])
    if key_mask is None or query.shape[2] != key.shape[2]:
        return grouped, None
    return grouped, by_head(key_mask).repeat(1, 1, query.shape[1] // key.shape[1])


def token_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over tokens, (B, H, L, D) -> (B, H, 1, D), in at least float32; what `mask`, (B, L) or (B, H or 1, L), hides
    is never read.

    A row without tokens, or with all of them hidden, has mean 0.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.sum(dim=-2, keepdim=True) / max(x.shape[-2], 1)
    visible = by_head(mask).unsqueeze(-1)
    # Chosen, not multiplied: 0·inf and 0·nan would spread. Chosen before the sum, so that gradients are 0 there too.
    total = torch.where(visible, x, 0).sum(dim=-2, keepdim=True)
    return total / visible.sum(dim=-2, keepdim=True).clamp(min=1).to(x.dtype)


def second_moment(x: Tensor) -> Tensor:
    """E x xᵀ over batch and tokens, (B, Hkv, L, D) -> (Hkv, D, D), in float64."""
    x = x.double()
    total: Tensor = (x.mT @ x).sum(0) / (x.shape[0] * x.shape[2])
    return total
