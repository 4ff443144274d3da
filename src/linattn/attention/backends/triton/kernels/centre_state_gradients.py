"""The kernel that sums the gradients of states, one centre a program, from the last group to the first.

Letters as in centres.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.attention.backends.triton.kernels.blocks import add_dot, operand
from linattn.attention.backends.triton.kernels.centres import (
    load_centre,
    load_moments,
    load_peak,
    picked_columns,
    picked_rows,
    rows_at,
    store_moments,
)


@triton.jit
def centre_state_gradients(
    query, places, sorted_rows, grad_out, highest, scalars, peaks, start, kept_states, last, cut, per_segment,
    num_segments, shape: tl.constexpr, has_start: tl.constexpr, is_causal: tl.constexpr, is_kept: tl.constexpr,
):  # fmt: skip
    """Gradients of the states after each group, as later rows leave them, and of those before segments of groups."""
    centre, rest = tl.program_id(0) % shape.num_centres, tl.program_id(0) // shape.num_centres
    segment, head = rest % num_segments, rest // num_segments
    if has_start:
        S_one, z_one, S_key, z_key = load_moments(start, rest, centre, shape)
    else:
        S_one, z_one = tl.full([shape.padded_dv], 0.0, tl.float32), 0.0
        S_key, z_key = 0.0, 0.0
        if shape.order == 1:
            S_key = tl.full([shape.padded_d, shape.padded_dv], 0.0, tl.float32)
            z_key = tl.full([shape.padded_d], 0.0, tl.float32)
    c = load_centre(places, head, centre, cut, shape)
    starts = sorted_rows.starts + head.to(tl.int64) * (cut.num_groups * shape.num_centres + 1) + centre
    first = segment * per_segment
    stop = tl.minimum(first + per_segment, cut.num_groups)
    for back in range(stop - first):
        group = stop - 1 - back
        if is_kept:
            store_moments(kept_states, head * cut.num_groups + group, centre, S_one, z_one, S_key, z_key, shape)
        peak = load_peak(peaks, head * (cut.num_groups + 1) + group, centre, shape)
        if is_causal:
            fall = tl.exp2(peak - load_peak(peaks, head * (cut.num_groups + 1) + group + 1, centre, shape))
            S_one, z_one = S_one * fall, z_one * fall
            if shape.order == 1:
                S_key, z_key = S_key * fall, z_key * fall
        end = tl.load(starts + (group * shape.num_centres + 1))
        for begin in range(tl.load(starts + group * shape.num_centres), end, shape.rows):
            token, at, row, there = rows_at(sorted_rows.order, head, begin, end, cut, shape)
            weight = tl.exp2(peak - tl.load(highest + at, mask=there, other=float("inf")))
            weight *= tl.load(scalars.inverse + at, mask=there, other=0.0)
            g = picked_rows(grad_out, row, token, there, cut.heads * cut.members, shape.dv, shape.padded_dv)
            plain = weight
            if shape.order == 1:
                share = tl.load(scalars.share + at, mask=there, other=0.0)
                plain = weight * (1 - share * tl.load(scalars.mean + at, mask=there, other=0.0))
                x = picked_columns(query, row, token, there, cut.heads * cut.members, shape.d, shape.padded_d)
                steps = tl.where(there[None, :], (x.to(tl.float32) - c[:, None]) * places.scale, 0.0)
                moved = operand(steps * (weight * share)[None, :], shape)
                S_key = add_dot(moved, operand(g, shape), S_key, shape)
                z_key += tl.sum(steps * (weight * tl.load(scalars.of_mean + at, mask=there, other=0.0))[None, :], 1)
            S_one += tl.sum(plain[:, None] * g.to(tl.float32), 0)
            z_one -= tl.sum(weight * tl.load(scalars.delta + at, mask=there, other=0.0), 0)
    store_moments(last, rest, centre, S_one, z_one, S_key, z_key, shape)
