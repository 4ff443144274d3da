"""The causal fold: each block reads the state before it and its own past, then is folded in.

Within a block every row shares the reference c, the running maximum after the block. A much larger later key would
underflow earlier rows, so heads whose maximum jumps within a block take the sums of jumps.py there. Letters as in
blocked/__init__.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Running, Workspace, block_size, blocks, columns, is_masked
from linattn.attention.backends.blocked.features import Keys, key_block, query_block, query_features
from linattn.attention.backends.blocked.jumps import split, split_rows
from linattn.attention.backends.blocked.reading import store_rows, times_z
from linattn.attention.sums import Sums, lowest
from linattn.feature_maps import FeatureMap

# A denominator may shrink to exp(-60): far above float32's smallest normal number, exp(-87).
_MAX_JUMP = 60.0

# The state is kept every so many blocks for the backward pass, which then folds each block in once more, not twice.
SEGMENT = 16


def num_checkpoints(length: int, size: int) -> int:
    """How many states are kept: those before every segment but the first, whose state was given."""
    return max(length - 1, 0) // (size * SEGMENT)


def safe_heads(keys: Keys, bias: Tensor | None, m: Tensor, c: Tensor, span: int) -> Tensor | None:
    """(B, H): where c exceeds, in no feature, by the allowed jump what the first row with a key sees; None for
    everywhere.

    Each head decides for itself, so that its rounding does not depend on its neighbours.
    """
    if keys.log is None:
        return None
    first = keys.log[..., 0, :]
    if span:
        first = m  # the first span sees no key of its own block
    elif bias is not None:
        masked = is_masked(bias)
        index = (~masked).to(torch.uint8).argmax(-1)[..., None, None]
        first = torch.take_along_dim(keys.log, index, dim=-2).squeeze(-2)
        # Rows before it see the state alone, where that holds any key.
        first = torch.where(masked[..., :1] & (m > lowest(m.dtype)), m, first)
    safe = (c - torch.maximum(m, first)).amax(-1) < _MAX_JUMP
    return None if bool(safe.all()) else safe


def causal_mask(length: int, span: int, device: torch.device) -> Tensor:
    """(n, n): which of a block's keys a row sees: up to its own, or those of earlier spans of so many tokens."""
    if not span:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    number = torch.arange(length, device=device) // span
    return number.unsqueeze(-1) > number


def hide_later_(scores: Tensor, groups: int, span: int) -> Tensor:
    """Scores (B·H, G·n, n) with those of unseen keys set to 0, in place."""
    rows = scores.unflatten(1, (groups, -1))
    if span:
        rows.masked_fill_(~causal_mask(scores.shape[-1], span, scores.device), 0)
    else:
        rows.tril_()
    return scores


def forward(
    feature_map: FeatureMap,
    bias: Tensor | None,  # (B, H or 1, L)
    query: Tensor,  # (B, H, G, L, D)
    key: Tensor,  # (B, H, L, D)
    value: Tensor,  # (B, H, L, Dv)
    *before: Tensor,  # S (B, H, R, Dv), z (B, H, R), m (B, H, M)
    span: int = 0,
) -> tuple[Tensor, ...]:
    """Output, denominator, its exponent; S, z, m after the last token; S, z, m before segments, (B, K, H, …)."""
    state, exponential = Running(Sums(*before)), feature_map.exponential
    batch, heads, groups, length, _ = query.shape
    out = query.new_empty(batch, heads, groups, length, value.shape[-1])
    den = before[0].new_empty(batch, heads, groups, length)
    reference, space = torch.empty_like(den), Workspace(den)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=True, span=span)
    checkpoints = [x.new_empty(batch, num_checkpoints(length, size), *x.shape[1:]) for x in before]
    for index, (start, stop) in enumerate(blocks(length, size)):
        if index and index % SEGMENT == 0:
            for kept, now in zip(checkpoints, state.views(), strict=True):
                kept[:, index // SEGMENT - 1] = now
        part = columns(bias, start, stop)
        k = space.rows("k", key[:, :, start:stop], part)
        keys = key_block(feature_map, k, part, space.buffer("keys", *k.shape[:-1], feature_map.num_features))
        x = space.rows("q", query[..., start:stop, :]).flatten(2, 3)
        t, c = query_block(feature_map, x, space), keys.peak(state.m)
        safe = safe_heads(keys, part, state.m, c, span)
        if safe is not None:
            cut = split(t, keys, space.rows("v", value[:, :, start:stop], part), groups, span, exponential)
            num_apart, total_apart, ref_apart = split_rows(cut, stop - start, state.views())
        state.rescale(c)
        phi_q, ref = query_features(t, c, exponential, over=True)
        phi_q, phi_k = phi_q.flatten(0, 1), keys.turned_relative_to(c).flatten(0, 1)
        v = space.rows("v", value[:, :, start:stop], part).flatten(0, 1)
        weights = hide_later_(space.product("weights", phi_q, phi_k.mT), groups, span)
        num = space.product("num", weights, v).baddbmm_(phi_q, state.S)
        total = weights.sum(-1, keepdim=True).add_(times_z(phi_q, state.z))
        if safe is not None:
            keep = safe.flatten()[:, None, None]
            num = torch.where(keep, num, num_apart.flatten(0, 1))
            total = torch.where(keep, total, total_apart.flatten(0, 1))
            ref = torch.where(safe[..., None], ref, ref_apart)
        store_rows(out[..., start:stop, :], den[..., start:stop], num, total)
        reference[..., start:stop] = ref.unflatten(2, (groups, stop - start))
        state.fold_in(phi_k, v)
    return out, den, reference, *state.sums(), *checkpoints
