"""The kernel that reads one centre's part of a state with a tile of queries, and causally their group's own keys.

Letters as in centres.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.attention.backends.triton.kernels.blocks import (
    LN_2,
    add_dot,
    at_head,
    dot,
    load_operand,
    operand,
)
from linattn.attention.backends.triton.kernels.centres import (
    block_around,
    load_centre,
    load_moments,
    load_peak,
    picked_rows,
    rows_at,
    seen_tokens,
    shares_of,
    steps_from,
    store_picked,
    tile_of,
    tops_of,
)


@triton.jit
def centre_rows(
    query, key, value, bias, places, sorted_rows, states, outputs, cut,
    shape: tl.constexpr, has_bias: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """Outputs, denominators, their exponents and peaks of rows; see `Expansion`."""
    tile, rest = tl.program_id(0) % sorted_rows.num_tiles, tl.program_id(0) // sorted_rows.num_tiles
    group, head = rest % cut.num_groups, rest // cut.num_groups
    starts = sorted_rows.starts + head.to(tl.int64) * (cut.num_groups * shape.num_centres + 1)
    centre, first, stop = tile_of(starts + group * shape.num_centres, tile, shape)
    if centre < shape.num_centres:
        token, at, row, there = rows_at(sorted_rows.order, head, first, stop, cut, shape)
        c = load_centre(places, head, centre, cut, shape)
        x = picked_rows(query, row, token, there, cut.heads * cut.members, shape.d, shape.padded_d)
        steps = steps_from(x, c, there, places)
        index = head * cut.num_groups + group if is_causal else head
        S_one, z_one, S_key, z_key = load_moments(states, index, centre, shape)
        peak = load_peak(states[2], index, centre, shape) + tl.full([shape.rows], 0.0, tl.float32)
        # Sums of p·v and p, and at order 1 of p·t·v and p·t, t the step's product with the key.
        num = tl.full([shape.rows, shape.padded_dv], 0.0, tl.float32) + S_one[None, :]
        den = tl.full([shape.rows], 0.0, tl.float32) + z_one
        if shape.order == 1:
            moved = operand(steps, shape)
            num_moved, den_moved = dot(moved, operand(S_key, shape), shape), tl.sum(steps * z_key[None, :], 1)
        if is_causal:
            seen = tl.where(there, seen_tokens(token, sorted_rows.span), 0)
            num_blocks = (tl.max(seen, 0) - group * cut.span + shape.block - 1) // shape.block
            for i in range(group * cut.per_group, group * cut.per_group + num_blocks):
                numbers, k, powers, whole, kept = block_around(key, bias, places, c, head, i, cut, shape, has_bias)
                is_seen = (numbers[None, :] < seen[:, None]) & kept[None, :]
                higher = tl.maximum(peak, tl.max(tops_of(powers[None, :], whole[None, :], is_seen), 1))
                fall = tl.exp2(peak - higher)
                peak = higher
                power = tl.minimum(powers[None, :] + (whole[None, :] - peak[:, None]), 1.0)
                weights = tl.where(is_seen, tl.exp2(power), 0.0)
                v = load_operand(at_head(value, head, cut.heads), value.token, numbers, kept, shape)
                rounded = operand(weights, shape)
                num = add_dot(rounded, v, num * fall[:, None], shape)
                den = den * fall + tl.sum(rounded.to(tl.float32), 1)
                if shape.order == 1:
                    turned = operand(weights * dot(moved, tl.trans(operand(k, shape)), shape), shape)
                    num_moved = add_dot(turned, v, num_moved * fall[:, None], shape)
                    den_moved = den_moved * fall + tl.sum(turned.to(tl.float32), 1)
        # A row that saw no key gives 0.
        inverse = 1 / tl.where(den == 0, float("inf"), den)
        out, mean = num * inverse[:, None], tl.full([shape.rows], 0.0, tl.float32)
        if shape.order == 1:
            share, _ = shares_of(steps, places, head, cut)
            mean = den_moved * inverse
            out += share[:, None] * (num_moved * inverse[:, None] - mean[:, None] * out)
        store_picked(outputs[0], at, there, out, shape.dv, shape.padded_dv)
        tl.store(outputs[1] + at, den, mask=there)
        tl.store(outputs[2] + at, peak * LN_2 + mean, mask=there)
        tl.store(outputs[3] + at, peak, mask=there)
