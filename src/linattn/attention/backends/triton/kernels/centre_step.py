"""The kernel of one token of an expansion: its key enters every centre's sums, each query reads those of its own.

In one launch; a centre's sums are relative to its largest exponent, as states keep them. Letters
as in centres.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.attention.backends.triton.kernels.blocks import LN_2, LOG2_E, at_head, load_rows
from linattn.attention.backends.triton.kernels.centres import (
    load_centre,
    local_size,
    place_of,
    shares_of,
    steps_from,
)


@triton.jit
def nearest_centres(x, probes, places, head, cut, shape: tl.constexpr):
    """The centre of each row (T, padded D), by the map's metric: of the largest q·p - c·p/2, p = Σc."""
    names, columns = tl.arange(0, shape.padded_centres), tl.arange(0, shape.padded_d)
    there = names < shape.num_centres
    at = (place_of(places, head, cut) * shape.num_centres + names)[:, None] * shape.padded_d + columns[None, :]
    p = tl.load(probes + at, mask=there[:, None], other=0.0)
    c = tl.load(places.centres + at, mask=there[:, None], other=0.0)
    found = tl.dot(x, tl.trans(p), input_precision="ieee") - (tl.sum(p * c, 1) / 2)[None, :]
    return tl.argmax(tl.where(there[None, :], found, float("-inf")), 1)


@triton.jit
def centre_step(
    query, key, value, bias, places, probes, before, after, outputs, cut, shape: tl.constexpr, has_bias: tl.constexpr
):
    """The sums after a token, and the rows of those of its G queries that are nearest to the program's centre.

    By parts of the values, whose sums stay in registers.
    """
    num_parts: tl.constexpr = (shape.dv + shape.padded_dv - 1) // shape.padded_dv
    part, rest = tl.program_id(0) % num_parts, tl.program_id(0) // num_parts
    centre, head = rest % shape.num_centres, rest // shape.num_centres
    c = load_centre(places, head, centre, cut, shape)
    names, columns = tl.arange(0, shape.padded_d), part * shape.padded_dv + tl.arange(0, shape.padded_dv)
    is_key, is_value, lift = names < shape.d, columns < shape.dv, 0.0
    if has_bias:
        one = tl.load(at_head(bias, head, cut.heads) + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        lift, is_kept = tl.sum(one, 0), one > float("-inf")
        is_key = is_key & is_kept
        is_value = is_value & is_kept
    mean = tl.load(places.key_mean + place_of(places, head, cut) * shape.padded_d + names)
    k = tl.load(at_head(key, head, cut.heads) + names, mask=is_key, other=0.0).to(tl.float32)
    k = tl.where(is_key, k - mean, 0.0)
    v = tl.load(at_head(value, head, cut.heads) + columns, mask=is_value, other=0.0).to(tl.float32)
    at = head.to(tl.int64) * shape.num_centres + centre
    m, own = tl.load(before[2] + at), tl.sum(k * c, 0) * (places.scale * LOG2_E) + lift
    former = m * LOG2_E
    highest = tl.maximum(own, former)
    phi, fall = tl.exp2(own - highest), tl.exp2(former - highest)
    # A maximum that stays keeps its bits.
    tl.store(after[2] + at, tl.where(own > former, own * LN_2, m), mask=part == 0)
    first, is_column = at * local_size(shape), columns < shape.dv
    S_one = tl.load(before[0] + first * shape.dv + columns, mask=is_column, other=0.0) * fall + phi * v
    z_one = tl.load(before[1] + first) * fall + phi
    tl.store(after[0] + first * shape.dv + columns, S_one, mask=is_column)
    tl.store(after[1] + first, z_one, mask=part == 0)
    members = tl.arange(0, shape.rows)
    is_query = members < cut.members
    x = load_rows(at_head(query, head, cut.heads), query.token, members, is_query, shape.d, shape.padded_d)
    x = x.to(tl.float32)
    is_near = is_query & (nearest_centres(x, probes, places, head, cut, shape) == centre)
    # A row that saw no key gives 0.
    inverse = 1 / tl.where(z_one == 0, float("inf"), z_one)
    read = tl.full([shape.rows, shape.padded_dv], 0.0, tl.float32) + (S_one * inverse)[None, :]
    turned = tl.full([shape.rows], 0.0, tl.float32)
    if shape.order == 1:
        moments = (first + 1 + names) * shape.dv
        mask = (names < shape.d)[:, None] & is_column[None, :]
        S_key = tl.load(before[0] + moments[:, None] + columns[None, :], mask=mask, other=0.0)
        z_key = tl.load(before[1] + first + 1 + names, mask=names < shape.d, other=0.0)
        S_key, z_key = S_key * fall + (phi * k)[:, None] * v[None, :], z_key * fall + phi * k
        tl.store(after[0] + moments[:, None] + columns[None, :], S_key, mask=mask)
        tl.store(after[1] + first + 1 + names, z_key, mask=(names < shape.d) & (part == 0))
        steps = steps_from(x, c, is_near, places)
        share, _ = shares_of(steps, places, head, cut)
        turned = tl.sum(steps * z_key[None, :], 1) * inverse
        moved = tl.dot(steps, S_key, input_precision="ieee") * inverse
        read += share[:, None] * (moved - turned[:, None] * read)
    row = head.to(tl.int64) * cut.members + members
    mask = is_near[:, None] & is_column[None, :]
    to = outputs[0] + row[:, None] * shape.dv + columns[None, :]
    tl.store(to, read.to(outputs[0].dtype.element_ty), mask=mask)
    tl.store(outputs[1] + row, tl.full([shape.rows], 0.0, tl.float32) + z_one, mask=is_near & (part == 0))
    tl.store(outputs[2] + row, highest * LN_2 + turned, mask=is_near & (part == 0))
