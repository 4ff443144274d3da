"""The kernel that folds keys and values into the parts of states, one centre a program. Letters as in centres.py."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.attention.backends.triton.kernels.blocks import (
    LOG2_E,
    NO_KEY,
    add_dot,
    at_head,
    load_rows,
    operand,
    tokens_of,
)
from linattn.attention.backends.triton.kernels.centres import (
    load_centre,
    load_centred_columns,
    load_lifts,
    load_moments,
    load_peak,
    store_moments,
    tops_of,
)


@triton.jit
def centre_states(
    key, value, bias, places, start, kept_states, last, cut, per_segment, num_segments,
    shape: tl.constexpr, has_bias: tl.constexpr, has_start: tl.constexpr, is_kept: tl.constexpr,
):  # fmt: skip
    """The states before each group, those after segments of blocks, and the peaks that they are relative to."""
    centre, rest = tl.program_id(0) % shape.num_centres, tl.program_id(0) // shape.num_centres
    segment, head = rest % num_segments, rest // num_segments
    if has_start:
        S_one, z_one, S_key, z_key = load_moments(start, rest, centre, shape)
        peak = load_peak(start[2], rest, centre, shape)
    else:
        S_one, z_one = tl.full([shape.padded_dv], 0.0, tl.float32), 0.0
        S_key, z_key = 0.0, 0.0
        if shape.order == 1:
            S_key = tl.full([shape.padded_d, shape.padded_dv], 0.0, tl.float32)
            z_key = tl.full([shape.padded_d], 0.0, tl.float32)
        peak = NO_KEY
    c = load_centre(places, head, centre, cut, shape)
    values = at_head(value, head, cut.heads)
    first = segment * per_segment
    for i in range(first, tl.minimum(first + per_segment, cut.num_blocks)):
        if is_kept and i % cut.per_group == 0:
            at = head * cut.num_groups + i // cut.per_group
            store_moments(kept_states, at, centre, S_one, z_one, S_key, z_key, shape)
            tl.store(kept_states[2] + at.to(tl.int64) * shape.num_centres + centre, peak)
        numbers, there = tokens_of(i, cut, shape)
        whole, fraction, kept = load_lifts(bias, head, numbers, there, cut, has_bias)
        k = load_centred_columns(key, places, head, numbers, kept, cut, shape)
        powers = tl.sum(k * c[:, None], 0) * (places.scale * LOG2_E) + fraction
        higher = tl.maximum(peak, tl.max(tops_of(powers, whole, kept), 0))
        fall = tl.exp2(peak - higher)
        peak = higher
        weights = tl.where(kept, tl.exp2(powers + (whole - peak)), 0.0)
        v = load_rows(values, value.token, numbers, kept, shape.dv, shape.padded_dv)
        S_one = S_one * fall + tl.sum(weights[:, None] * v.to(tl.float32), 0)
        z_one = z_one * fall + tl.sum(weights, 0)
        if shape.order == 1:
            moved = operand(weights[None, :] * k, shape)
            S_key = add_dot(moved, operand(v, shape), S_key * fall, shape)
            z_key = z_key * fall + tl.sum(moved.to(tl.float32), 1)
    store_moments(last, rest, centre, S_one, z_one, S_key, z_key, shape)
    tl.store(last[2] + rest.to(tl.int64) * shape.num_centres + centre, peak)
