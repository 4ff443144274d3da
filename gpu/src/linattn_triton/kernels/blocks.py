"""Parts of the kernels: how a block of tokens is found, loaded, turned into features and rounded.

Powers of two throughout: a feature is 2^(power - shift). A shift is an integer and a fraction of a key's own bias, so
that the factors between shifts are exact. Letters as in linattn_triton, and C tokens of a block, F features of a
tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# The shift of no key: finite, so that differences of shifts are never inf - inf.
NO_KEY = tl.constexpr(-1e30)
# Features of the largest power are 2^30: products reach 2^60, far below the limit, and 60 bits more stand above 0.
HEADROOM = tl.constexpr(30.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Rows(NamedTuple):
    """A tensor of tokens: its memory, and the strides of batch, head and token."""

    data: Any
    batch: Any
    head: Any
    token: Any


class Side(NamedTuple):
    """Powers W·x + b + a·|x|² of one side, in units of log 2: memory and the strides of batch and head."""

    weights: Any  # (H or 1, tiles·F, padded D)
    bias: Any  # (B or 1, H or 1, tiles·F), NO_KEY for features that only fill a tile
    curvature: Any  # (H or 1, tiles·F)
    weights_head: Any
    bias_batch: Any
    bias_head: Any
    curvature_head: Any


class Keys(NamedTuple):
    """Offsets and shifts of keys, (B, H, L): a key's weight is 2^(power - shift + offset)."""

    offset: Any  # an integer, NO_KEY for masked keys
    shift: Any  # inf for masked keys


class RowGradients(NamedTuple):
    """Numbers that the gradient of a row needs, (B, H, G, L)."""

    inverse: Any  # 1/den, 0 for rows without a key
    delta: Any  # the gradient of log den, negated
    shift: Any  # of the query's powers
    peak: Any  # the largest offset the row sees


class KeyGradients(NamedTuple):
    """Where the gradients of keys go, (B, H, parts, L, ·)."""

    key: Any
    value: Any
    bias: Any


class Cut(NamedTuple):
    """How L tokens are cut: groups of `span` tokens, each of `per_group` blocks; rows read the state before a group."""

    length: Any
    span: Any
    per_group: Any
    num_blocks: Any
    num_groups: Any
    heads: Any  # H
    members: Any  # G


class Shape(NamedTuple):
    """Constants that a kernel is compiled for."""

    d: int
    padded_d: int
    dv: int
    padded_dv: int
    num_features: int
    total: int  # R filled to whole tiles
    tile: int  # F
    block: int  # C
    kind: str  # "powers": computed here; "exponents", "features": given in the tokens' place
    operand: Any  # dtype of what is multiplied
    precision: str  # of products of float32
    reloads: bool  # load a block's vectors and values for every tile, and keep none in registers
    emulated: bool  # round by bits instead of a cast, for interpreters that cannot


@triton.jit
def operand(x, shape: tl.constexpr):
    """Round what is to be multiplied; to bfloat16 as its bits are, to nearest even, where that is emulated."""
    if shape.emulated:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = bits.to(tl.float32, bitcast=True)
    else:
        rounded = x.to(shape.operand)
    return rounded


@triton.jit
def dot(a, b, shape: tl.constexpr):
    """The product of two operands."""
    return tl.dot(a, b, input_precision=shape.precision)


@triton.jit
def add_dot(a, b, total, shape: tl.constexpr):
    """total + a·b."""
    return tl.dot(a, b, total, input_precision=shape.precision)


@triton.jit
def tokens_of(i, cut, shape: tl.constexpr):
    """The numbers of block i's tokens, and which of them there are."""
    group = i // cut.per_group
    first = group * cut.span + (i % cut.per_group) * shape.block
    stop = tl.minimum(tl.minimum(first + shape.block, (group + 1) * cut.span), cut.length)
    numbers = first + tl.arange(0, shape.block)
    return numbers, numbers < stop


@triton.jit
def at_head(rows, head, num_heads):
    """Where a head's tokens begin; heads are counted through the batch."""
    return rows.data + (head // num_heads).to(tl.int64) * rows.batch + (head % num_heads).to(tl.int64) * rows.head


@triton.jit
def load_rows(begin, stride, numbers, live, width: tl.constexpr, padded: tl.constexpr, again: tl.constexpr = False):
    """(C, padded width), 0 beyond both; `again` where it stands, which compilers would move out of a loop."""
    columns = tl.arange(0, padded)
    mask = live[:, None] & (columns < width)[None, :]
    place = begin + numbers.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(place, mask=mask, other=0.0, volatile=again)


@triton.jit
def load_operand(begin, stride, numbers, live, shape: tl.constexpr, again: tl.constexpr = False):
    """Values of a block, (C, padded Dv), as an operand."""
    return operand(load_rows(begin, stride, numbers, live, shape.dv, shape.padded_dv, again), shape)


@triton.jit
def operand_at_hand(x, begin, stride, numbers, live, shape: tl.constexpr):
    """Values of a block for one tile's product: as they were loaded, or again, where that spares registers."""
    return load_operand(begin, stride, numbers, live, shape, True) if shape.reloads else x


@triton.jit
def curved_rows(begin, stride, numbers, live, curved, shape: tl.constexpr):
    """The gradient of a·|x|², 2·x·Σ a·(gradient of the power), (C, padded D)."""
    x = load_rows(begin, stride, numbers, live, shape.d, shape.padded_d)
    return 2 * curved[:, None] * x.to(tl.float32)


@triton.jit
def load_columns(begin, stride, numbers, live, width: tl.constexpr, padded: tl.constexpr):
    """Load rows as columns (padded width, C), 0 beyond both."""
    rows = tl.arange(0, padded)
    mask = (rows < width)[:, None] & live[None, :]
    return tl.load(begin + numbers.to(tl.int64)[None, :] * stride + rows[:, None], mask=mask, other=0.0)


@triton.jit
def store_rows(begin, numbers, live, x, width: tl.constexpr, padded: tl.constexpr):
    """Write (C, width) to memory without gaps, in its dtype."""
    columns = tl.arange(0, padded)
    mask = live[:, None] & (columns < width)[None, :]
    to = begin + numbers.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, x.to(begin.dtype.element_ty), mask=mask)


@triton.jit
def features_of(tile, shape: tl.constexpr):
    """The numbers of a tile's features."""
    return tile * shape.tile + tl.arange(0, shape.tile)


@triton.jit
def load_vectors(begin, stride, numbers, live, shape: tl.constexpr, again: tl.constexpr = False):
    """A block's vectors (C, D) as operands and their squared lengths; nothing where features are given."""
    if shape.kind == "powers":
        x = load_rows(begin, stride, numbers, live, shape.d, shape.padded_d, again)
        square = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        x = operand(x, shape)
    else:
        x, square = 0, 0
    return x, square


@triton.jit
def load_vector_columns(begin, stride, numbers, live, shape: tl.constexpr):
    """A block's vectors as columns (D, C), as `load_vectors` has them as rows."""
    if shape.kind == "powers":
        x = load_columns(begin, stride, numbers, live, shape.d, shape.padded_d)
        square = tl.sum(x.to(tl.float32) * x.to(tl.float32), 0)
        x = operand(x, shape)
    else:
        x, square = 0, 0
    return x, square


@triton.jit
def load_weights(side, head, cut, tile, shape: tl.constexpr):
    """W of a tile, (F, padded D); nothing where features are given. Heads are counted through the batch."""
    if shape.kind == "powers":
        begin = side.weights + (head % cut.heads).to(tl.int64) * side.weights_head
        columns = tl.arange(0, shape.padded_d)
        w = operand(tl.load(begin + features_of(tile, shape)[:, None] * shape.padded_d + columns[None, :]), shape)
    else:
        w = 0
    return w


@triton.jit
def load_bias(side, head, cut, tile, shape: tl.constexpr):
    """b of a tile, (F,)."""
    begin = side.bias + (head // cut.heads).to(tl.int64) * side.bias_batch
    return tl.load(begin + (head % cut.heads).to(tl.int64) * side.bias_head + features_of(tile, shape))


@triton.jit
def load_curvature(side, head, cut, tile, shape: tl.constexpr):
    """a of a tile, (F,)."""
    begin = side.curvature + (head % cut.heads).to(tl.int64) * side.curvature_head
    return tl.load(begin + features_of(tile, shape))


@triton.jit
def load_given(begin, stride, numbers, live, tile, shape: tl.constexpr):
    """Given exponents or features of a tile, (C, F) in float32."""
    names = features_of(tile, shape)
    mask = live[:, None] & (names < shape.num_features)[None, :]
    x = tl.load(begin + numbers.to(tl.int64)[:, None] * stride + names[None, :], mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_given_columns(begin, stride, numbers, live, tile, shape: tl.constexpr):
    """Given exponents or features of a tile, (F, C) in float32."""
    names = features_of(tile, shape)
    mask = (names < shape.num_features)[:, None] & live[None, :]
    x = tl.load(begin + numbers.to(tl.int64)[None, :] * stride + names[:, None], mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def row_powers(vectors, w, side, head, cut, begin, stride, numbers, live, tile, shape: tl.constexpr):
    """Powers (C, F) of a block's tokens, or their features where these are given."""
    if shape.kind == "powers":
        loaded = load_vectors(begin, stride, numbers, live, shape, True) if shape.reloads else vectors
        powers = dot(loaded[0], tl.trans(w), shape) + load_bias(side, head, cut, tile, shape)[None, :]
        powers += loaded[1][:, None] * load_curvature(side, head, cut, tile, shape)[None, :]
    else:
        powers = load_given(begin, stride, numbers, live, tile, shape)
        if shape.kind == "exponents":
            powers = powers * LOG2_E + load_bias(side, head, cut, tile, shape)[None, :]
    return powers


@triton.jit
def column_powers(vectors, w, side, head, cut, begin, stride, numbers, live, tile, shape: tl.constexpr):
    """Powers (F, C), as `row_powers`, from tokens (D, C): computed so, never turned around."""
    if shape.kind == "powers":
        powers = dot(w, vectors[0], shape) + load_bias(side, head, cut, tile, shape)[:, None]
        powers += vectors[1][None, :] * load_curvature(side, head, cut, tile, shape)[:, None]
    else:
        powers = load_given_columns(begin, stride, numbers, live, tile, shape)
        if shape.kind == "exponents":
            powers = powers * LOG2_E + load_bias(side, head, cut, tile, shape)[:, None]
    return powers


@triton.jit
def as_features(powers, shift, live, shape: tl.constexpr):
    """2^(power - shift), or given features times 2^-shift; 0 where there is no token."""
    features = powers * tl.exp2(-shift) if shape.kind == "features" else tl.exp2(powers - shift)
    return tl.where(live, features, 0.0)


@triton.jit
def load_state(S, index, tile, shape: tl.constexpr):
    """S of a tile, (F, padded Dv), of the index-th state of whole tiles."""
    begin = S + index.to(tl.int64) * (shape.total * shape.dv)
    every = tl.full([shape.tile], 1, tl.int1)
    return load_rows(begin, shape.dv, features_of(tile, shape), every, shape.dv, shape.padded_dv)


@triton.jit
def load_sums(z, index, tile, shape: tl.constexpr):
    """z of a tile, (F,)."""
    return tl.load(z + index.to(tl.int64) * (shape.total) + features_of(tile, shape))


@triton.jit
def load_operand_state(states, index, tile, shape: tl.constexpr):
    """S of a tile as an operand, and z."""
    return operand(load_state(states[0], index, tile, shape), shape), load_sums(states[1], index, tile, shape)


@triton.jit
def store_state(S, z, index, tile, sums, total, shape: tl.constexpr):
    """Write both."""
    size: tl.constexpr = shape.total
    every = tl.full([shape.tile], 1, tl.int1)
    store_rows(
        S + index.to(tl.int64) * (size * shape.dv), features_of(tile, shape), every, sums, shape.dv, shape.padded_dv
    )
    tl.store(z + index.to(tl.int64) * size + features_of(tile, shape), total)


@triton.jit
def load_keys(keys, at, there):
    """Shifts and offsets of a block's keys, and which of them are not masked; finite for those that are."""
    shift = tl.load(keys.shift + at, mask=there, other=float("inf"))
    live = there & (shift < float("inf"))
    return tl.where(live, shift, 0.0), tl.load(keys.offset + at, mask=live, other=NO_KEY), live


@triton.jit
def seen_by(numbers, live):
    """Which of a block's keys a row of it sees, (C, C): itself and those before."""
    return (numbers[:, None] >= numbers[None, :]) & live[None, :]


@triton.jit
def highest_seen(offset, peak, numbers, live):
    """The largest offset that each row of a block sees, before the block or in it."""
    return tl.maximum(peak, tl.max(tl.where(seen_by(numbers, live), offset[None, :], NO_KEY), 1))


@triton.jit
def store_given(target, row, numbers, live, tile, x, cut, shape: tl.constexpr):
    """Write a tile (C, F) of what was given for a head's tokens."""
    names = features_of(tile, shape)
    mask = live[:, None] & (names < shape.num_features)[None, :]
    begin = target + (row.to(tl.int64) * cut.length + numbers)[:, None] * shape.num_features
    tl.store(begin + names[None, :], x.to(target.dtype.element_ty), mask=mask)
