"""The kernel that prepares each row's gradient. Letters as in linattn_triton."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_triton.kernels.blocks import at_head, highest_seen, load_keys, load_rows, tokens_of

# The smallest normal float32: a smaller denominator has no inverse.
SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def row_gradients(
    grad_out, out, den, shift, grad_den, keys, peaks, gradients, cut, shape: tl.constexpr, is_causal: tl.constexpr
):
    """Numbers of `blocks.RowGradients`."""
    i, row = tl.program_id(0) % cut.num_blocks, tl.program_id(0) // cut.num_blocks
    head = row // cut.members
    numbers, there = tokens_of(i, cut, shape)
    at = row.to(tl.int64) * cut.length + numbers
    total = tl.load(den + at, mask=there, other=0.0)
    begin = out + row.to(tl.int64) * cut.length * shape.dv
    y = load_rows(begin, shape.dv, numbers, there, shape.dv, shape.padded_dv).to(tl.float32)
    begin = at_head(grad_out, row, cut.heads * cut.members)
    grad = load_rows(begin, grad_out.token, numbers, there, shape.dv, shape.padded_dv).to(tl.float32)
    delta = tl.sum(y * grad, 1) - tl.load(grad_den + at, mask=there, other=0.0) * total
    is_dead = tl.abs(total) < SMALLEST
    tl.store(gradients.inverse + at, tl.where(is_dead, 0.0, 1 / tl.where(is_dead, 1.0, total)), mask=there)
    tl.store(gradients.delta + at, tl.where(is_dead, 0.0, delta), mask=there)
    # The features of such a row are 0 instead of overflowing.
    powers = tl.load(shift + at, mask=there, other=0.0)
    tl.store(gradients.shift + at, tl.where(is_dead, float("inf"), powers), mask=there)
    peak = tl.load(peaks + head.to(tl.int64) * (cut.num_groups + 1) + i // cut.per_group)
    highest = tl.full([shape.block], peak, tl.float32)
    if is_causal:
        _, offset, live = load_keys(keys, head.to(tl.int64) * cut.length + numbers, there)
        highest = highest_seen(offset, peak, numbers, live)
    tl.store(gradients.peak + at, highest, mask=there)
