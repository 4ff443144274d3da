"""The kernel that finds how large each key's features are, by that key alone: no later key shows in earlier rows.

Letters as in linattn_triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_triton.kernels.blocks import (
    HEADROOM,
    LOG2_E,
    NO_KEY,
    at_head,
    load_vectors,
    load_weights,
    row_powers,
    tokens_of,
)


@triton.jit
def key_offsets(key, bias, side, keys, peaks, cut, shape: tl.constexpr, has_bias: tl.constexpr):
    """Offsets and shifts of the keys, (B, H, L), and the largest offset of each block, (B, H, blocks)."""
    i, head = tl.program_id(0) % cut.num_blocks, tl.program_id(0) // cut.num_blocks
    numbers, there = tokens_of(i, cut, shape)
    live, whole = there, tl.full([shape.block], 0.0, tl.float32)
    fraction = whole
    if has_bias:
        log_weight = tl.load(at_head(bias, head, cut.heads) + numbers * bias.token, mask=live, other=float("-inf"))
        live = live & (log_weight > float("-inf"))
        log_weight = tl.where(live, log_weight * LOG2_E, 0.0)
        # Apart, since a large bias would cost the shift its digits.
        whole = tl.floor(log_weight)
        fraction = log_weight - whole
    power = tl.full([shape.block], 0.0, tl.float32)
    if shape.kind != "features":
        begin = at_head(key, head, cut.heads)
        vectors = load_vectors(begin, key.token, numbers, live, shape)
        largest = tl.full([shape.block], NO_KEY, tl.float32)
        for tile in range(shape.total // shape.tile):
            w = load_weights(side, head, cut, tile, shape)
            powers = row_powers(vectors, w, side, head, cut, begin, key.token, numbers, live, tile, shape)
            largest = tl.maximum(largest, tl.max(powers, 1))
        power = tl.ceil(largest) - HEADROOM
    offset = tl.where(live, power + whole, NO_KEY)
    at = head.to(tl.int64) * cut.length + numbers
    tl.store(keys.offset + at, offset, mask=there)
    if has_bias:
        tl.store(keys.shift + at, tl.where(live, power - fraction, float("inf")), mask=there)
    tl.store(peaks + head.to(tl.int64) * cut.num_blocks + i, tl.max(offset, 0))
