"""Causal rows over what was seen before and their own past, and back. Letters as in triton/__init__.py, J groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.records import Causal, Gradients, Saved, empty_sums
from linattn.attention.backends.triton import reading
from linattn.attention.backends.triton.gradients import Back
from linattn.attention.backends.triton.kernels import blocks
from linattn.attention.backends.triton.kernels.key_states import key_states
from linattn.attention.backends.triton.kernels.row_outputs import row_outputs
from linattn.attention.backends.triton.launching import FoldedKeys, Work, fold_keys, plan
from linattn.attention.backends.triton.reading import empty_outputs
from linattn.attention.backends.triton.segments import (
    States,
    as_sums,
    headroom,
    of_features,
    run_segments,
    whole_tiles,
)
from linattn.attention.sums import per_feature
from linattn.feature_maps import FeatureMap
from linattn.softmax.precision import LOG2_E


class CausalOutputs(NamedTuple):
    """Rows, the sums after the last token, and the powers of two that the queries' features are relative to."""

    out: Tensor  # (B, H, G, L, Dv)
    den: Tensor  # (B, H, G, L)
    reference: Tensor  # (B, H, G, L)
    S: Tensor  # (B, H, R, Dv)
    z: Tensor  # (B, H, R)
    m: Tensor  # (B, H, M)
    shift: Tensor  # (B, H, G, L)


def empty_like(inputs: Causal, span: int) -> CausalOutputs:
    """Memory for all outputs."""
    out, den, reference, shift = reading.empty_like(inputs)
    return CausalOutputs(out, den, reference, *empty_sums(inputs), shift)


class Passed(NamedTuple):
    """A pass over the keys: the work, the keys, peaks between groups (B·H, J + 1), states before each and after all."""

    work: Work
    folded: FoldedKeys
    peaks: Tensor
    fall: Tensor  # (B, H, R), what the given sums were multiplied by
    states: States
    last: States


def forward(feature_map: FeatureMap, inputs: Causal, span: int = 0) -> CausalOutputs:
    """Rows; with `span`, of the keys of earlier spans of so many tokens only."""
    work, folded, peaks, _, states, last = _pass(feature_map, inputs, span, saved=None)
    query, outputs = work.queries(inputs.query), empty_outputs(work, inputs.query)
    sides = work.query_side.side(), work.key_side.side()
    programs = outputs.den[..., 0].numel() * work.cut.num_blocks if outputs.den.numel() else 0
    arguments = query, folded.key, folded.value, *sides, folded.keys, peaks, tuple(states), tuple(outputs)
    work.run(row_outputs, programs, (*arguments, work.cut), (span == 0,))
    sums = as_sums(work, last, peaks[:, -1].view(inputs.key.shape[:2]), inputs.m.shape[-1])
    out = outputs.out.to(inputs.query.dtype)
    return CausalOutputs(out, outputs.den, outputs.reference, *sums, outputs.shift)


def backward(feature_map: FeatureMap, saved: Saved, span: int = 0) -> Gradients:
    """The gradients of query, key, value, S and z."""
    inputs: Causal = saved.inputs
    work, folded, peaks, fall, states, _ = _pass(feature_map, inputs, span, saved=saved)
    sides = work.query_side.side(), work.key_side.side()
    back = Back(work, saved, folded if span == 0 else None, peaks, sides)
    queries = back.rows()
    lift = 2.0 ** -headroom(work)
    after = whole_tiles(work, saved.grads.S * lift, saved.grads.z * lift)
    of_states, first = back.states(queries, after, is_kept=True)
    of_query = back.queries(queries, states)
    back.folded = folded
    of_key, of_value, of_bias = back.keys(queries if span == 0 else None, of_states)
    of_S, of_z = of_features(work, first, inputs.key.shape[0])
    sums = of_S * fall.unsqueeze(-1), of_z * fall
    return Gradients((of_query, of_key, of_value, *sums), of_bias, back.finish())


def _pass(feature_map: FeatureMap, inputs: Causal, span: int, *, saved: Saved | None) -> Passed:
    """Fold the keys and sum their states."""
    query, key, value, S, z, m, bias = inputs
    sizes = (*query.shape[:4], value.shape[-1])
    work = plan(feature_map, key, sizes, span=span, saved=saved)
    folded = fold_keys(work, key, value, bias)
    # The given sums relative to one power of two.
    first = ((m * LOG2_E).amax(-1).ceil() - headroom(work)).clamp(min=blocks.NO_KEY.value)
    fall = per_feature(torch.exp2(m * LOG2_E - first.unsqueeze(-1)), z.shape[-1])
    peaks = torch.cat((first.unsqueeze(-1), _by_group(work, folded.peaks)), -1).flatten(0, 1).cummax(-1).values
    start = whole_tiles(work, S * fall.unsqueeze(-1), z * fall)
    tokens = folded.key, folded.value, work.key_side.side(), folded.keys
    states, last = run_segments(work, key_states, tokens, peaks, start, is_kept=True)
    return Passed(work, folded, peaks, fall, states, last)


def _by_group(work: Work, peaks: Tensor) -> Tensor:
    """The largest offsets of groups of blocks, (B, H, J)."""
    cut = work.cut
    missing = cut.num_groups * cut.per_group - cut.num_blocks
    padded = torch.nn.functional.pad(peaks, (0, missing), value=blocks.NO_KEY.value)
    return padded.unflatten(-1, (cut.num_groups, cut.per_group)).amax(-1) if cut.per_group > 1 else padded
