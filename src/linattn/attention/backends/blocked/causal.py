"""The causal fold: each block reads the sums before it and its own past, then is folded in.

What a block does is of joint_causal.py for plain maps, of grouped_causal.py for grouped ones, and of bounded_causal.py
where features need no maxima.

It is pulled back block by block from the last to the first, features recomputed, no state unwound: the forward pass
keeps the sums before every segment of blocks; a segment's own sums, and its keys' features, are computed once more when
the sweep reaches it, so that memory does not grow with its number. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Running, blocks, by_columns, num_blocks
from linattn.attention.backends.blocked.bounded import bounded_powers, by_head, lists, stretches, whole
from linattn.attention.backends.blocked.bounded_causal import BoundedGradients, BoundedRows
from linattn.attention.backends.blocked.grouped_causal import BlockState, GroupedGradients, GroupedRows, TokenGradients
from linattn.attention.backends.blocked.joint_causal import JointGradients, JointRows
from linattn.attention.backends.blocked.records import Causal, CausalOutputs, Gradients, Saved, empty_sums, sums_of
from linattn.attention.backends.blocked.rows import empty_rows, rows_of, store_rows
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap, GroupedFeatureMap

# The sums are kept every so many blocks for the backward pass, which then folds each block in once more, not twice.
SEGMENT = 16


def forward(feature_map: FeatureMap, inputs: Causal, span: int = 0) -> CausalOutputs:
    """Rows, and what the backward pass needs; with `span`, of the keys of earlier spans of so many tokens only."""
    sweep = _Sweep(feature_map, inputs, span)
    kept, is_bounded = empty_checkpoints(inputs, span), no_bounds(inputs, span)
    for index, segment in enumerate(segments(inputs, span)):
        if index:
            for target, now in zip(kept, sweep.state.views(), strict=True):
                target[:, index - 1] = now
        is_bounded[:, index] = sweep.advance(segment)
    return CausalOutputs(*sweep.rows, *sweep.state.sums(), *kept, is_bounded)


def rows_alone(feature_map: FeatureMap, inputs: Causal, span: int = 0) -> tuple[Rows, Sums]:
    """Rows, and the sums after them, where no gradient follows: in stretches as long as those of a pass over keys."""
    sweep = _Sweep(feature_map, inputs, span)
    for stretch in stretches(_cut(inputs, span), inputs.query, inputs.S):
        sweep.advance(stretch)
    return sweep.rows, sweep.state.sums()


class _Sweep:
    """A forward pass under way: the sums so far, and the rows that they were read by."""

    def __init__(self, feature_map: FeatureMap, inputs: Causal, span: int) -> None:
        self._fold: JointRows | GroupedRows
        if isinstance(feature_map, GroupedFeatureMap):
            self._fold = GroupedRows(feature_map, inputs, span)
        else:
            self._fold = JointRows(feature_map, inputs, span)
        powers = bounded_powers(feature_map, inputs.query, inputs.S)
        joint = self._fold if isinstance(self._fold, JointRows) else None
        self._bounded = None if powers is None or joint is None else BoundedRows(powers, joint)
        self.state, self.rows = Running(sums_of(inputs)), empty_rows(inputs.query, inputs.S)

    def advance(self, blocks: list[slice]) -> Tensor | bool:
        """Fold consecutive blocks in and store their rows; the heads (B, H) in which features were bounded."""
        bounded, state, rows = self._bounded, self.state, self.rows
        if bounded is None:
            self._advance(blocks)
            return False
        found, sums = bounded.segment(blocks, state), state.own()
        advance = partial(bounded.advance, blocks, found, state, rows)
        holds = by_head(found.fits, advance, partial(self._advance, blocks), sums, rows_of(rows, whole(blocks)))
        bounded.is_hopeful &= ~found.fits | holds
        return holds

    def _advance(self, blocks: list[slice]) -> None:
        """The same, whatever the tokens."""
        for block in blocks:
            store_rows(self.rows, block, *self._fold.advance(block, self.state))


def backward(feature_map: FeatureMap, saved: Saved, span: int = 0) -> Gradients:
    """Gradients of (query, key, value, S, z)."""
    inputs: Causal = saved.inputs
    outputs: CausalOutputs = saved.outputs
    fold: JointGradients | GroupedGradients
    if isinstance(feature_map, GroupedFeatureMap):
        fold = GroupedGradients(feature_map, saved, span)
    else:
        fold = JointGradients(feature_map, saved, span, at_once=SEGMENT)
    powers = bounded_powers(feature_map, inputs.query, inputs.S)
    bounded = BoundedGradients(powers, fold, saved) if powers is not None and isinstance(fold, JointGradients) else None
    tokens = TokenGradients(*(x.new_empty(x.shape) for x in (inputs.query, inputs.key, inputs.value)))
    S, z = by_columns(saved.grads.S), saved.grads.z.clone(memory_format=torch.contiguous_format)
    for index, segment in reversed(list(enumerate(segments(inputs, span)))):
        before = outputs.kept(index) if index else sums_of(inputs)
        general = partial(_pull, fold, segment, before, S, z, tokens)
        if bounded is None:
            general()
            continue
        pull, fits = partial(bounded.pull, segment, before, S, z, tokens), outputs.is_bounded[:, index]
        by_head(fits, pull, general, (S, z), [*tokens.of(whole(segment)), *fold.of_bias.of(whole(segment))])
    return Gradients((*tokens, S.contiguous(), z), fold.of_bias.total, fold.back.finish())


def _pull(
    fold: JointGradients | GroupedGradients,
    segment: list[slice],
    before: Sums,
    S: Tensor,
    z: Tensor,
    tokens: TokenGradients,
) -> None:
    """Write the gradients of the sums before a segment over those after it; its tokens' are stored."""
    for visit in reversed(_segment_states(fold, segment, before)):
        found = fold.pull(visit, S, z, tokens)
        for target, x in zip((S, z), found, strict=True):
            if x is not target:
                target.copy_(x)


def _segment_states(fold: JointGradients | GroupedGradients, segment: list[slice], before: Sums) -> list[BlockState]:
    """The blocks of a segment, each with the sums before it."""
    found, state = [], Running(before)
    for slot, block in enumerate(segment):
        entry = Sums(*(fold.space.buffer(f"{slot} {i}", *x.shape).copy_(x) for i, x in enumerate(state.views())))
        x, v = fold.keys.tokens(block, f"{slot} "), fold.keys.values(block)
        keys = fold.keys.features(block, x, f"{slot} " if fold.keeps_features else "")
        c = keys.peak(entry.m)
        safe = fold.safe_heads(keys, block, entry.m, c)
        phi_k = keys.turned_relative_to(c)
        found.append(BlockState(block, entry, c, x, keys, phi_k, safe))
        if slot + 1 < len(segment):
            state.rescale(c)
            state.fold_in(phi_k, v)
    return found


def segments(inputs: Causal, span: int) -> list[list[slice]]:
    """The blocks of the forward and the backward pass, in segments."""
    return lists(_cut(inputs, span), SEGMENT)


def _cut(inputs: Causal, span: int) -> list[slice]:
    """All blocks."""
    return blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span)


def empty_outputs(inputs: Causal, span: int) -> CausalOutputs:
    """Memory for all outputs."""
    rows, kept = empty_rows(inputs.query, inputs.S), empty_checkpoints(inputs, span)
    return CausalOutputs(*rows, *empty_sums(inputs), *kept, no_bounds(inputs, span))


def empty_checkpoints(inputs: Causal, span: int) -> Sums:
    """Memory for the sums before every segment but the first, which are given: (B, K, H, …)."""
    num_kept = max(num_blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span) - 1, 0) // SEGMENT
    return Sums(*(x.new_empty(x.shape[0], num_kept, *x.shape[1:]) for x in sums_of(inputs)))


def no_bounds(inputs: Causal, span: int) -> Tensor:
    """(B, K + 1, H) bool: no segment of any head has bounded features."""
    num_segments = -(-num_blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span) // SEGMENT)
    return inputs.S.new_zeros(inputs.S.shape[0], num_segments, inputs.S.shape[1], dtype=torch.bool)
