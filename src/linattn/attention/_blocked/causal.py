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
    Workspace,
    block_size,
    blocks,
    joined,
    key_block,
    parted,
    query_block,
    query_features,
    with_ones,
)
from linattn.attention._blocked.jumps import split, split_rows
from linattn.attention._blocked.reading import store_rows
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
    (S, z), exponential = parted(moments), feature_map.exponential
    batch, heads, groups, length, _ = query.shape
    out = query.new_empty(batch, heads, groups, length, value.shape[-1])
    den = moments.new_empty(batch, heads, groups, length)
    reference, space = torch.empty_like(den), Workspace(moments)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=True)
    for start, stop in blocks(length, size):
        part = None if mask is None else mask[:, start:stop]
        keys = key_block(feature_map, space.rows("k", key[:, :, start:stop], part), part, space)
        v = space.rows("v", value[:, :, start:stop], part)
        x, span = space.rows("q", query[..., start:stop, :], None).flatten(2, 3), (groups, stop - start)
        t, c = query_block(feature_map, x, space), keys.peak(m)
        safe = safe_heads(keys, part, m, c)
        if safe is not None:
            cut = split(t, keys, with_ones(v), groups, exponential)
            apart, ref_apart = split_rows(cut, stop - start, joined(S, z, moments), m)
        rescale(S, z, m, c)
        phi_q, ref = query_features(t, c, exponential, over=True)
        phi_k = keys.turned_relative_to(c)
        phi_q, phi_k, v = phi_q.flatten(0, 1), phi_k.flatten(0, 1), v.flatten(0, 1)
        weights = space.buffer("weights", batch * heads, phi_q.shape[1], stop - start)
        torch.bmm(phi_q, phi_k.mT, out=weights)
        weights.unflatten(1, (groups, -1)).tril_()
        num = torch.bmm(weights, v, out=space.buffer("rows", *phi_q.shape[:2], v.shape[-1])).baddbmm_(phi_q, S)
        total = weights.sum(-1, keepdim=True).add_(torch.bmm(z.mT, phi_q.mT).mT)
        if safe is not None:
            keep = safe.flatten()[:, None, None]
            num = torch.where(keep, num, apart[..., :-1].flatten(0, 1))
            total = torch.where(keep, total, apart[..., -1:].flatten(0, 1))
            ref = torch.where(safe[..., None], ref, ref_apart)
        store_rows(out[..., start:stop, :], den[..., start:stop], num, total)
        reference[..., start:stop] = ref.unflatten(2, span)
        fold_in(S, z, phi_k, v)
        m = c
    return out, den, reference, joined(S, z, moments), m.clone()
