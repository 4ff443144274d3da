"""The folds of this backend, which autograd, torch.compile and torch.func run as they run those of plain torch: keys
absorbed, sums read by queries, and causal rows over what was seen before and their own past, each forward and back.

Opaque to torch.compile: torch.library.wrap_triton leaves tensors within a kernel's records out of the graph. Letters as
in linattn_triton, J groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.fold import Fold
from linattn.attention.backends.blocked.records import (
    Absorb,
    Causal,
    Gradients,
    Read,
    Saved,
    empty_rows,
    empty_sums,
    sums_of,
)
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap
from linattn.softmax.precision import LOG2_E
from linattn_triton.gradients import Back
from linattn_triton.kernels import blocks
from linattn_triton.kernels.blocks import NO_KEY
from linattn_triton.kernels.key_states import key_states
from linattn_triton.kernels.row_outputs import row_outputs
from linattn_triton.launching import FoldedKeys, Work, fold_keys, plan
from linattn_triton.segments import (
    States,
    as_sums,
    headroom,
    of_features,
    run_segments,
    whole_tiles,
)


def absorb(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    work, folded, peaks = _folded(feature_map, inputs, saved=None)
    tokens = folded.key, folded.value, work.key_side.side(), folded.keys
    _, last = run_segments(work, key_states, tokens, peaks, None, is_kept=False)
    sums = as_sums(work, last, peaks[:, 0].view(inputs.key.shape[:2]), inputs.m.shape[-1])
    return sums.merge(sums_of(inputs))


def absorb_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """The gradients of key, value, S and z."""
    inputs: Absorb = saved.inputs
    work, folded, peaks = _folded(feature_map, inputs, saved=saved)
    of_S, of_z, num_features = saved.grads.S, saved.grads.z, work.shape.num_features
    before = per_feature(torch.exp(inputs.m - saved.outputs.m), num_features)
    # The sums are relative to m, which is at least the keys' own peak; that of masked keys is of no account.
    fall = torch.exp2((peaks[:, 0].view(*of_z.shape[:2], 1) - saved.outputs.m * LOG2_E).clamp(max=0))
    fall = per_feature(fall, num_features)
    states = whole_tiles(work, of_S * fall.unsqueeze(-1), of_z * fall)
    back = Back(work, saved, folded, peaks, (work.query_side.side(), work.key_side.side()))
    of_key, of_value, of_bias = back.keys(None, states)
    return Gradients((of_key, of_value, of_S * before.unsqueeze(-1), of_z * before), of_bias, back.finish())


def _folded(feature_map: FeatureMap, inputs: Absorb, *, saved: Saved | None) -> tuple[Work, FoldedKeys, Tensor]:
    """The keys as one group, and its peak, (B·H, 2)."""
    key, value, *_, bias = inputs
    batch, heads, length, _ = key.shape
    sizes = (batch, heads, 1, length, value.shape[-1])
    work = plan(feature_map, key, sizes, span=length, saved=saved)
    folded = fold_keys(work, key, value, bias)
    highest = torch.nn.functional.pad(folded.peaks, (1, 0), value=NO_KEY.value).amax(-1)
    return work, folded, highest.view(-1, 1).expand(-1, 2).contiguous()


class ReadOutputs(NamedTuple):
    """Rows, and the powers of two that their queries' features are relative to."""

    out: Tensor  # (B, H, G, L, Dv)
    den: Tensor  # (B, H, G, L)
    reference: Tensor  # (B, H, G, L)
    shift: Tensor  # (B, H, G, L)


def read(feature_map: FeatureMap, inputs: Read) -> ReadOutputs:
    """All rows."""
    work, peaks, sides, states = _sums(feature_map, inputs, saved=None)
    outputs = empty_outputs(work, inputs.query)
    query = work.queries(inputs.query)
    programs = outputs.den[..., 0].numel() * work.cut.num_blocks if outputs.den.numel() else 0
    arguments = query, query, query, *sides, blocks.Keys(peaks, peaks), peaks, tuple(states), tuple(outputs)
    work.run(row_outputs, programs, (*arguments, work.cut), (False,))
    return outputs._replace(out=outputs.out.to(inputs.query.dtype))


def read_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """The gradients of query, S and z."""
    work, peaks, sides, states = _sums(feature_map, saved.inputs, saved=saved)
    back = Back(work, saved, None, peaks, sides)
    queries = back.rows()
    of_query = back.queries(queries, states)
    _, first = back.states(queries, None, is_kept=False)
    return Gradients((of_query, *of_features(work, first, of_query.shape[0])), None, back.finish())


def empty_outputs(work: Work, query: Tensor) -> ReadOutputs:
    """Memory for the rows of queries (B, H, G, L, D)."""
    out = torch.empty(*query.shape[:-1], work.shape.dv, dtype=query.dtype, device=query.device)
    den = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    return ReadOutputs(work.as_operand(out), den, torch.empty_like(den), torch.empty_like(den))


def empty_like(inputs: Read | Causal) -> ReadOutputs:
    """Memory for what the rows of these queries will be."""
    rows = empty_rows(inputs.query, inputs.S)
    return ReadOutputs(*rows, torch.empty_like(rows.den))


def _sums(
    feature_map: FeatureMap, inputs: Read, *, saved: Saved | None
) -> tuple[Work, Tensor, tuple[blocks.Side, blocks.Side], States]:
    """The work, the sums' peak twice, (B·H, 2), both sides and the sums as one state before one group of all rows.

    The exponents of the sums' features are added to the queries' powers: no feature has to be scaled.
    """
    query, S, z, m = inputs
    batch, heads, members, length, _ = query.shape
    work = plan(feature_map, query, (batch, heads, members, length, S.shape[-1]), span=length, saved=saved)
    peaks, side = m.new_zeros(batch * heads, 2), work.query_side.side(m)
    if work.shape.kind == "features":
        peaks, side = (m * LOG2_E).view(-1, 1).expand(-1, 2).contiguous(), work.query_side.side()
    return work, peaks, (side, work.key_side.side()), whole_tiles(work, S, z)


class CausalOutputs(NamedTuple):
    """Rows, the sums after the last token, and the powers of two that the queries' features are relative to."""

    out: Tensor  # (B, H, G, L, Dv)
    den: Tensor  # (B, H, G, L)
    reference: Tensor  # (B, H, G, L)
    S: Tensor  # (B, H, R, Dv)
    z: Tensor  # (B, H, R)
    m: Tensor  # (B, H, M)
    shift: Tensor  # (B, H, G, L)


def empty_causal(inputs: Causal, span: int) -> CausalOutputs:
    """Memory for all outputs."""
    out, den, reference, shift = empty_like(inputs)
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


ABSORB = Fold(
    "linattn_triton.folds:ABSORB",
    absorb,
    absorb_backward,
    Absorb,
    Sums,
    lambda inputs, _: empty_sums(inputs),
)
READ = Fold(
    "linattn_triton.folds:READ",
    read,
    read_backward,
    Read,
    ReadOutputs,
    lambda inputs, _: empty_like(inputs),
)
CAUSAL = Fold("linattn_triton.folds:CAUSAL", forward, backward, Causal, CausalOutputs, empty_causal)
