"""The causal fold: each block reads the sums before it and its own past, then is folded in.

What a block does is of joint_causal.py for plain maps, and of grouped_causal.py for grouped ones.

It is pulled back block by block from the last to the first, features recomputed, no state unwound: the forward pass
keeps the sums before every segment of blocks; a segment's own sums, and its keys' features, are computed once more when
the sweep reaches it, so that memory does not grow with its number. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

import torch

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Running, blocks, by_columns, num_blocks
from linattn.attention.backends.blocked.grouped_causal import BlockState, GroupedGradients, GroupedRows, TokenGradients
from linattn.attention.backends.blocked.joint_causal import JointGradients, JointRows
from linattn.attention.backends.blocked.records import (
    Causal,
    CausalOutputs,
    Gradients,
    Saved,
    empty_rows,
    empty_sums,
    store_rows,
    sums_of,
)
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap, GroupedFeatureMap

# The sums are kept every so many blocks for the backward pass, which then folds each block in once more, not twice.
SEGMENT = 16


def forward(feature_map: FeatureMap, inputs: Causal, span: int = 0) -> CausalOutputs:
    """Rows, and what the backward pass needs; with `span`, of the keys of earlier spans of so many tokens only."""
    checkpoints = empty_checkpoints(inputs, span)
    rows, after = sweep(feature_map, inputs, span, checkpoints)
    return CausalOutputs(*rows, *after, *checkpoints)


def sweep(feature_map: FeatureMap, inputs: Causal, span: int, checkpoints: Sums | None = None) -> tuple[Rows, Sums]:
    """Rows, and the sums after them; `kept` is where those before every segment but the first are written."""
    fold: JointRows | GroupedRows
    if isinstance(feature_map, GroupedFeatureMap):
        fold = GroupedRows(feature_map, inputs, span)
    else:
        fold = JointRows(feature_map, inputs, span)
    state, rows = Running(sums_of(inputs)), empty_rows(inputs.query, inputs.S)
    for index, block in enumerate(_cut(inputs, span)):
        if checkpoints is not None and index and index % SEGMENT == 0:
            for target, now in zip(checkpoints, state.views(), strict=True):
                target[:, index // SEGMENT - 1] = now
        store_rows(rows, block, *fold.advance(block, state))
    return rows, state.sums()


def backward(feature_map: FeatureMap, saved: Saved, span: int = 0) -> Gradients:
    """Gradients of (query, key, value, S, z)."""
    inputs: Causal = saved.inputs
    outputs: CausalOutputs = saved.outputs
    fold: JointGradients | GroupedGradients
    if isinstance(feature_map, GroupedFeatureMap):
        fold = GroupedGradients(feature_map, saved, span)
    else:
        fold = JointGradients(feature_map, saved, span, at_once=SEGMENT)
    tokens = TokenGradients(*(x.new_empty(x.shape) for x in (inputs.query, inputs.key, inputs.value)))
    S, z = by_columns(saved.grads.S), saved.grads.z.clone(memory_format=torch.contiguous_format)
    cut = _cut(inputs, span)
    for first in reversed(range(0, len(cut), SEGMENT)):
        before = outputs.kept(first // SEGMENT) if first else sums_of(inputs)
        for visit in reversed(_segment_states(fold, cut[first : first + SEGMENT], before)):
            # Those of the sums before a block are written over those after it.
            for target, x in zip((S, z), fold.pull(visit, S, z, tokens), strict=True):
                if x is not target:
                    target.copy_(x)
    return Gradients((*tokens, S.contiguous(), z), fold.of_bias.total, fold.back.finish())


def _segment_states(fold: JointGradients | GroupedGradients, segment: list[slice], before: Sums) -> list[BlockState]:
    """The blocks of a segment, each with the sums before it."""
    visits, state = [], Running(before)
    for slot, block in enumerate(segment):
        m = state.m
        S, z = (fold.space.buffer(f"{slot} {i}", *x.shape).copy_(x) for i, x in enumerate(state.views()[:2]))
        x, v = fold.keys.tokens(block, f"{slot} "), fold.keys.values(block)
        keys = fold.keys.features(block, m, x, f"{slot} " if fold.keeps_features else "")
        c = keys.peak(m)
        safe = fold.safe_heads(keys, block, m, c)
        phi_k = keys.turned_relative_to(c)
        visits.append(BlockState(block, Sums(S, z, m), c, x, keys, phi_k, safe))
        if slot + 1 < len(segment):
            state.rescale(c)
            state.fold_in(phi_k, v, keys.total)
    return visits


def _cut(inputs: Causal, span: int) -> list[slice]:
    """All blocks."""
    return blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span)


def empty_outputs(inputs: Causal, span: int) -> CausalOutputs:
    """Memory for all outputs."""
    rows, checkpoints = empty_rows(inputs.query, inputs.S), empty_checkpoints(inputs, span)
    return CausalOutputs(*rows, *empty_sums(inputs), *checkpoints)


def empty_checkpoints(inputs: Causal, span: int) -> Sums:
    """Memory for the sums before every segment but the first, which are given: (B, K, H, …)."""
    num_kept = max(num_blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span) - 1, 0) // SEGMENT
    return Sums(*(x.new_empty(x.shape[0], num_kept, *x.shape[1:]) for x in sums_of(inputs)))
