"""The causal fold: each block reads the sums before it and its own past, then is folded in.

Plain maps share one reference c among a block's rows, the running maximum after the block. A much larger later key
would underflow earlier rows, so heads whose maximum jumps within a block take the sums of jumps.py there. Grouped maps
have rows of their own (grouped_causal.py). Letters as in blocked/__init__.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Running, Workspace, blocks, causal_mask, is_masked, num_blocks
from linattn.attention.backends.blocked.features import (
    KeyBlocks,
    Keys,
    by_kind,
    query_block,
    query_features,
    query_rows,
)
from linattn.attention.backends.blocked.grouped_causal import GroupedRows
from linattn.attention.backends.blocked.jumps import split, split_rows
from linattn.attention.backends.blocked.reading import empty_rows, store_rows, times_z
from linattn.attention.backends.blocked.records import Causal, CausalOutputs, sums_of
from linattn.attention.sums import Sums, lowest
from linattn.feature_maps import FeatureMap

# A denominator may shrink to exp(-60): far above float32's smallest normal number, exp(-87).
_MAX_JUMP = 60.0

# The sums are kept every so many blocks for the backward pass, which then folds each block in once more, not twice.
SEGMENT = 16


def forward(feature_map: FeatureMap, inputs: Causal, span: int = 0) -> CausalOutputs:
    """Rows; with `span`, of the keys of earlier spans of so many tokens only."""
    fold = by_kind(feature_map, JointRows, GroupedRows)(feature_map, inputs, span)
    state, rows, kept = Running(sums_of(inputs)), empty_rows(inputs.query, inputs.S), empty_checkpoints(inputs, span)
    for index, block in enumerate(causal_blocks(inputs, span)):
        if index and index % SEGMENT == 0:
            for target, now in zip(kept, state.views(), strict=True):
                target[:, index // SEGMENT - 1] = now
        store_rows(rows, block, *fold.advance(block, state))
    return CausalOutputs(*rows, *state.sums(), *kept)


def causal_blocks(inputs: Causal, span: int) -> list[slice]:
    """The blocks of the forward and the backward pass."""
    return blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span)


def empty_checkpoints(inputs: Causal, span: int) -> Sums:
    """Memory for the sums before every segment but the first, which are given: (B, K, H, …)."""
    num_kept = max(num_blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span) - 1, 0) // SEGMENT
    return Sums(*(x.new_empty(x.shape[0], num_kept, *x.shape[1:]) for x in sums_of(inputs)))


class JointRows:
    """A block's rows for plain maps, all relative to one exponent."""

    def __init__(self, feature_map: FeatureMap, inputs: Causal, span: int) -> None:
        self._map, self._query, self._span, self._space = feature_map, inputs.query, span, Workspace(inputs.S)
        self._keys = KeyBlocks(feature_map, inputs, self._space)

    def advance(self, block: slice, state: Running) -> tuple[Tensor, Tensor, Tensor]:
        """Num (B·H, G·n, Dv), den (B·H, G·n, 1) and its exponent (B, H, G·n); the block is folded in."""
        space, span, groups, exponential = self._space, self._span, self._query.shape[2], self._map.exponential
        keys, values, apart = self._keys.features(block), self._keys.values(block), None
        t = query_block(self._map, query_rows(self._query, block, space), space)
        c = keys.peak(state.m)
        safe = safe_heads(keys, self._keys.bias(block), state.m, c, span)
        # First, since rescaling and the features write over the sums, queries and keys that the split rows need.
        if safe is not None:
            cut = split(t, keys, values, groups, span, exponential)
            apart = split_rows(cut, values.shape[2], state.views())
        state.rescale(c)
        phi_q, reference = query_features(t, c, exponential, over=True)
        phi_k = keys.turned_relative_to(c)
        # (φ(q)φ(k)ᵀ)v + φ(q)S: the block's own past first, n × n weights; then what came before it.
        flat_q = phi_q.flatten(0, 1)
        weights = hide_later_(space.product("weights", flat_q, phi_k.flatten(0, 1).mT), groups, span)
        num = space.product("num", weights, values.flatten(0, 1)).baddbmm_(flat_q, state.S)
        den = weights.sum(-1, keepdim=True).add_(times_z(flat_q, state.z))
        state.fold_in(phi_k, values)
        if safe is None or apart is None:
            return num, den, reference
        keep = safe.flatten()[:, None, None]
        num, den = (torch.where(keep, x, y.flatten(0, 1)) for x, y in zip((num, den), apart[:2], strict=True))
        return num, den, torch.where(safe[..., None], reference, apart[2])


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


def hide_later_(scores: Tensor, groups: int, span: int) -> Tensor:
    """Scores (B·H, G·n, n) with those of unseen keys set to 0, in place."""
    rows = scores.unflatten(1, (groups, -1))
    if span:
        rows.masked_fill_(~causal_mask(scores.shape[-1], span, scores.device), 0)
    else:
        rows.tril_()
    return scores
