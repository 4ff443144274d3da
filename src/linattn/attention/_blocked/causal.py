"""The causal fold: each block reads the state before it and its own past, then is folded in; letters as in blocks.py.

Within a block every row shares the reference c, the running maximum after the block. A much larger later key would
underflow earlier rows, so heads whose maximum jumps within a block take the sums of jumps.py there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention._blocked.absorption import fold_in, rescale
from linattn.attention._blocked.blocks import (
    Keys,
    block_size,
    blocks,
    key_block,
    masked_rows,
    query_features,
    with_ones,
)
from linattn.attention._blocked.jumps import split, split_rows
from linattn.attention._blocked.reading import divide
from linattn.feature_maps import FeatureMap

# A denominator may shrink to exp(-60): far above float32's smallest normal number, exp(-87).
_MAX_JUMP = 60.0


def safe_heads(keys: Keys, mask: Tensor | None, m: Tensor, c: Tensor) -> Tensor | None:
    """(B, H): where c exceeds, in no feature, by the allowed jump what the first row with a key sees; None for
    everywhere.

    Each head decides for itself, so that its rounding does not depend on its neighbours.
    """
    if keys.log is None:
        return None
    first = keys.log[..., 0, :]
    if mask is not None:
        index = mask.to(torch.uint8).argmax(-1)[:, None, None, None]
        first = torch.take_along_dim(keys.log, index, dim=-2).squeeze(-2)
    safe = (c - torch.maximum(m, first)).amax(-1) < _MAX_JUMP
    return None if bool(safe.all()) else safe


def scores(phi_q: Tensor, phi_k: Tensor, groups: int) -> Tensor:
    """φ(q)φ(k)ᵀ, (B, H, G·n, n), later keys set to 0."""
    product = phi_q @ phi_k.mT
    product.unflatten(-2, (groups, -1)).tril_()
    return product


def forward(
    feature_map: FeatureMap,
    mask: Tensor | None,  # (B, L)
    query: Tensor,  # (B, H, G, L, D)
    key: Tensor,  # (B, H, L, D)
    value: Tensor,  # (B, H, L, Dv)
    moments: Tensor,  # (B, H, R, E)
    m: Tensor,  # (B, H, M)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, denominator, its exponent, and the state after the last token."""
    moments, m, dtype = moments.clone(memory_format=torch.contiguous_format), m.clone(), moments.dtype
    batch, heads, groups, length, _ = query.shape
    out = query.new_empty(batch, heads, groups, length, value.shape[-1])
    den = moments.new_empty(batch, heads, groups, length)
    reference = torch.empty_like(den)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=True)
    for start, stop in blocks(length, size):
        part = None if mask is None else mask[:, start:stop]
        keys = key_block(feature_map, masked_rows(key[:, :, start:stop], part, dtype), part)
        extended = with_ones(masked_rows(value[:, :, start:stop], part, dtype))
        x = query[..., start:stop, :].flatten(2, 3).to(dtype)
        t, span = feature_map.query(x), (groups, stop - start)
        c = keys.peak(m)
        phi_k, safe = keys.relative_to(c), safe_heads(keys, part, m, c)
        if safe is not None:
            cut = split(t, keys, extended, groups, feature_map.exponential)
            split_sums, split_ref = split_rows(cut, stop - start, moments, m)
        rescale(moments, m, c)
        phi_q, ref = query_features(t, c, feature_map.exponential)
        rows = scores(phi_q, phi_k, groups) @ extended
        rows.flatten(0, 1).baddbmm_(phi_q.flatten(0, 1), moments.flatten(0, 1))
        if safe is not None:
            rows = torch.where(safe[..., None, None], rows, split_sums)
            ref = torch.where(safe[..., None], ref, split_ref)
        rows, ref = rows.unflatten(2, span), ref.unflatten(2, span)
        out[..., start:stop, :], den[..., start:stop] = divide(rows)
        reference[..., start:stop] = ref
        fold_in(moments, phi_k, extended)
        m = c
    return out, den, reference, moments, m
