"""Sums read by queries, and back. Letters as in triton/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.records import Causal, Gradients, Read, Saved
from linattn.attention.backends.blocked.rows import empty_rows
from linattn.attention.backends.triton.gradients import Back
from linattn.attention.backends.triton.kernels import blocks
from linattn.attention.backends.triton.kernels.row_outputs import row_outputs
from linattn.attention.backends.triton.launching import Work, plan
from linattn.attention.backends.triton.segments import States, of_features, whole_tiles
from linattn.feature_maps import FeatureMap
from linattn.softmax.precision import LOG2_E


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
