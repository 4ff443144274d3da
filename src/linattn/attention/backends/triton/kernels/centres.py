"""What the kernels of expansions share: centres, queries sorted by centre, the weights of keys around a centre.

Powers of two throughout: around a centre c a key weighs 2^(power - peak), its power that of scale·c·(k - k̄) and of its
bias, whose integer stays apart; peaks are integers, so that the factors between them are exact. A centre's part of a
state has the weights' sum and, at order 1, that of w·(k - k̄). Letters as in triton/__init__.py, and C tokens of a
block, T rows of a tile, J groups of tokens, K centres, F = R/K numbers of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linattn.attention.backends.triton.kernels.blocks import LOG2_E, NO_KEY, at_head, load_columns, load_rows, tokens_of
from linattn.feature_maps.expansion import _REACH

REACH = tl.constexpr(_REACH)


class Places(NamedTuple):
    """The map's constants in sets, one for all heads or each its own: where a head's set is, in sets."""

    centres: Any  # (sets, K, padded D)
    key_mean: Any  # (sets, padded D)
    spread: Any  # (sets,)
    scale: Any
    batch: Any
    head: Any


class Sorted(NamedTuple):
    """Queries of each key/value head by groups of tokens, in these by centres, and around one centre by tokens."""

    order: Any  # (B·H, L·G), token·G + query head of the group
    starts: Any  # (B·H, J·K + 1), where the queries of each group's centres start
    num_tiles: Any  # of a group, at most
    span: Any  # rows see the keys of earlier spans of so many tokens; 0: those up to their own


class RowScalars(NamedTuple):
    """What the gradients of keys and states need of each row, (B, H, G, L)."""

    inverse: Any  # 1/den, 0 for rows without a key
    share: Any  # of the step from the centre that is taken
    mean: Any  # u, the step's inner product with the mean key
    of_mean: Any  # the gradient of u
    delta: Any  # the gradient of log den, negated


class Expanded(NamedTuple):
    """What a kernel is compiled for."""

    d: int
    padded_d: int
    dv: int
    padded_dv: int
    num_centres: int
    padded_centres: int
    order: int
    rows: int  # T
    block: int  # C
    operand: Any  # dtype of what is multiplied
    precision: str  # of products of float32
    emulated: bool  # round by bits instead of a cast, for interpreters that cannot


@triton.jit
def place_of(places, head, cut):
    """Which set of constants a head has; heads are counted through the batch."""
    return (head // cut.heads).to(tl.int64) * places.batch + (head % cut.heads).to(tl.int64) * places.head


@triton.jit
def load_centre(places, head, centre, cut, shape: tl.constexpr):
    """(padded D,), 0 beyond D."""
    which = place_of(places, head, cut) * shape.num_centres + centre
    return tl.load(places.centres + which * shape.padded_d + tl.arange(0, shape.padded_d))


@triton.jit
def load_lifts(bias, head, numbers, there, cut, has_bias: tl.constexpr):
    """The integers and fractions of the keys' biases in powers of two, and which keys are not masked."""
    kept, whole = there, tl.where(there, 0.0, 0.0)
    fraction = whole
    if has_bias:
        begin = at_head(bias, head, cut.heads)
        given = tl.load(begin + numbers.to(tl.int64) * bias.token, mask=there, other=float("-inf")).to(tl.float32)
        kept = there & (given > float("-inf"))
        given = tl.where(kept, given * LOG2_E, 0.0)
        whole = tl.floor(given)
        fraction = given - whole
    return whole, fraction, kept


@triton.jit
def load_centred_rows(key, places, head, numbers, kept, cut, shape: tl.constexpr):
    """Keys less the fixed mean, (C, padded D) in float32, 0 beyond both."""
    begin = at_head(key, head, cut.heads)
    x = load_rows(begin, key.token, numbers, kept, shape.d, shape.padded_d).to(tl.float32)
    mean = tl.load(places.key_mean + place_of(places, head, cut) * shape.padded_d + tl.arange(0, shape.padded_d))
    return tl.where(kept[:, None], x - mean[None, :], 0.0)


@triton.jit
def load_centred_columns(key, places, head, numbers, kept, cut, shape: tl.constexpr):
    """The same as (padded D, C)."""
    begin = at_head(key, head, cut.heads)
    x = load_columns(begin, key.token, numbers, kept, shape.d, shape.padded_d).to(tl.float32)
    mean = tl.load(places.key_mean + place_of(places, head, cut) * shape.padded_d + tl.arange(0, shape.padded_d))
    return tl.where(kept[None, :], x - mean[:, None], 0.0)


@triton.jit
def block_around(key, bias, places, c, head, i, cut, shape: tl.constexpr, has_bias: tl.constexpr):
    """A block's tokens, keys less the mean, their powers around a centre and which there are, and its integers."""
    numbers, live = tokens_of(i, cut, shape)
    whole, fraction, kept = load_lifts(bias, head, numbers, live, cut, has_bias)
    k = load_centred_rows(key, places, head, numbers, kept, cut, shape)
    powers = tl.sum(k * c[None, :], 1) * (places.scale * LOG2_E) + fraction
    return numbers, k, powers, whole, kept


@triton.jit
def tile_of(starts, tile, shape: tl.constexpr):
    """A tile's centre, K where the group has fewer tiles, and where its rows start and the centre's stop."""
    names = tl.arange(0, shape.padded_centres)
    there = names < shape.num_centres
    begin = tl.load(starts + names, mask=there, other=0)
    end = tl.load(starts + names + 1, mask=there, other=0)
    numbers = (end - begin + shape.rows - 1) // shape.rows
    ends = tl.cumsum(numbers, 0)
    centre = tl.sum(((ends <= tile) & there).to(tl.int32), 0)
    own = names == centre
    first = tl.sum(tl.where(own, begin + (tile - ends + numbers) * shape.rows, 0), 0)
    return centre, first, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def rows_at(order, head, first, stop, cut, shape: tl.constexpr):
    """The tokens of a tile's rows, where they are in (B, H, G, L), their query heads and which of them there are."""
    places = first + tl.arange(0, shape.rows)
    there = places < stop
    found = tl.load(order + head.to(tl.int64) * cut.length * cut.members + places, mask=there, other=0)
    token, row = found // cut.members, head * cut.members + found % cut.members
    return token, row.to(tl.int64) * cut.length + token, row, there


@triton.jit
def seen_tokens(token, span):
    """The number of tokens whose keys a row sees."""
    return tl.where(span == 0, token + 1, token - token % tl.maximum(span, 1))


@triton.jit
def picked_rows(x, row, token, there, heads, width: tl.constexpr, padded: tl.constexpr):
    """Rows (T, padded width) of any heads and tokens, 0 beyond both."""
    begin = (row // heads).to(tl.int64) * x.batch + (row % heads).to(tl.int64) * x.head + token.to(tl.int64) * x.token
    columns = tl.arange(0, padded)
    mask = there[:, None] & (columns < width)[None, :]
    return tl.load(x.data + begin[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def picked_columns(x, row, token, there, heads, width: tl.constexpr, padded: tl.constexpr):
    """The same as (padded width, T)."""
    begin = (row // heads).to(tl.int64) * x.batch + (row % heads).to(tl.int64) * x.head + token.to(tl.int64) * x.token
    columns = tl.arange(0, padded)
    mask = (columns < width)[:, None] & there[None, :]
    return tl.load(x.data + begin[None, :] + columns[:, None], mask=mask, other=0.0)


@triton.jit
def store_picked(to, at, there, x, width: tl.constexpr, padded: tl.constexpr):
    """Write rows (T, width) to their places in memory without gaps."""
    columns = tl.arange(0, padded)
    mask = there[:, None] & (columns < width)[None, :]
    tl.store(to + at[:, None] * width + columns[None, :], x.to(to.dtype.element_ty), mask=mask)


@triton.jit
def steps_from(x, centre, there, places):
    """scale·(q - c) of rows (T, padded D)."""
    return tl.where(there[:, None], (x.to(tl.float32) - centre[None, :]) * places.scale, 0.0)


@triton.jit
def shares_of(steps, places, head, cut):
    """The share of each step that is taken, and the squared lengths of those that are shortened, else 0."""
    square = tl.sum(steps * steps, 1)
    deviation = tl.sqrt(square) * tl.load(places.spread + place_of(places, head, cut))
    is_long = deviation > REACH
    return tl.where(is_long, REACH / tl.where(is_long, deviation, 1.0), 1.0), tl.where(is_long, square, 0.0)


@triton.jit
def local_size(shape: tl.constexpr):
    """F."""
    return 1 + shape.d * shape.order


@triton.jit
def load_moments(states, index, centre, shape: tl.constexpr):
    """A centre's part of the index-th state: Σ w·v, Σ w, and at order 1 Σ w·(k - k̄)·vᵀ and Σ w·(k - k̄)."""
    first = (index.to(tl.int64) * shape.num_centres + centre) * local_size(shape)
    columns, rows = tl.arange(0, shape.padded_dv), tl.arange(0, shape.padded_d)
    S = states[0] + first * shape.dv
    S_one = tl.load(S + columns, mask=columns < shape.dv, other=0.0).to(tl.float32)
    z_one = tl.load(states[1] + first)
    S_key, z_key = 0.0, 0.0
    if shape.order == 1:
        mask = (rows < shape.d)[:, None] & (columns < shape.dv)[None, :]
        S_key = tl.load(S + shape.dv + rows[:, None] * shape.dv + columns[None, :], mask=mask, other=0.0)
        z_key = tl.load(states[1] + first + 1 + rows, mask=rows < shape.d, other=0.0)
    return S_one, z_one, S_key, z_key


@triton.jit
def store_moments(states, index, centre, S_one, z_one, S_key, z_key, shape: tl.constexpr):
    """Write them."""
    first = (index.to(tl.int64) * shape.num_centres + centre) * local_size(shape)
    columns, rows = tl.arange(0, shape.padded_dv), tl.arange(0, shape.padded_d)
    S = states[0] + first * shape.dv
    tl.store(S + columns, S_one.to(S.dtype.element_ty), mask=columns < shape.dv)
    tl.store(states[1] + first, z_one)
    if shape.order == 1:
        mask = (rows < shape.d)[:, None] & (columns < shape.dv)[None, :]
        tl.store(S + shape.dv + rows[:, None] * shape.dv + columns[None, :], S_key.to(S.dtype.element_ty), mask=mask)
        tl.store(states[1] + first + 1 + rows, z_key, mask=rows < shape.d)


@triton.jit
def load_peak(peaks, index, centre, shape: tl.constexpr):
    """What a centre's part of the index-th state is relative to."""
    return tl.load(peaks + index.to(tl.int64) * shape.num_centres + centre)


@triton.jit
def tops_of(powers, whole, kept):
    """The integers above keys' powers, NO_KEY for masked ones."""
    return tl.where(kept, tl.ceil(powers) + whole, NO_KEY)
