"""Exponential features of bounded size: one exponent c per head, no maximum over features and no shift of any.

A map whose exponents are p·log 2 + t(|x|), p = W·x and t a term of the row (feature_maps/_powers.py), has φ(x) = 2ᵖ·eᵗ.
By Cauchy-Schwarz |p|·log 2 ≤ max|w|·|x|, known from the tokens' lengths before any product. Where that is at most
LIMIT, the powers 2ᵖ themselves are numbers of float32, and nothing has to be subtracted from them:

    S = Σ_j 2^{p(k_j)}·u_j v_jᵀ,   z = Σ_j 2^{p(k_j)}·u_j,   u_j = exp(t(k_j) + bias_j - c)
    out_i = 2^{p(q_i)}ᵀS / 2^{p(q_i)}ᵀz,   with the exponent t(q_i) + c beside the denominator

A feature block is written by a product, turned by exp2 and read by a product; the weights u go to the Dv columns of
the values. The running maxima m of all features are this one c, so such sums are sums like any others.

Error: with u the unit roundoff and γ = D·u, the rounding of p moves a power by a factor of at most exp(γ·LIMIT), as it
moves a shifted one; the two subtractions of the general form, each up to LIMIT·u, fall away. Nothing is lost below or
above float32's range [e^-87, e^88] as long as

* powers lie within exp(±LIMIT), so that each is rounded to its own relative precision,
* live keys' weights lie within exp(-DEPTH) and exp(RISE), c being raised where a key would exceed that,
* values are at most MAX_VALUE, and so |num| ≤ MAX_VALUE·den and |S| ≤ MAX_VALUE·z,
* denominators lie within exp(±DEPTH): FMA rounds a product that underflows to a multiple of e^-103, so R·n of them
  move a denominator by less than a roundoff,
* z lies within exp(-FLOOR) and exp(DEPTH): the general form, which reads the same sums, allows denominators another
  exp(-MAX_JUMP) below them.

The first three are checked before (`bounded_keys`, `fits_rows`), the last two after. What does not hold, head by head
and stretch by stretch of tokens, is computed again by the general form and chosen by head (`by_head`): no head's bits
depend on its neighbours. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Workspace
from linattn.attention.backends.blocked.features import KeyBlocks
from linattn.feature_maps import FeatureMap
from linattn.feature_maps._powers import Powers

LIMIT, DEPTH, RISE, FLOOR = 80.0, 60.0, 20.0, 20.0
MAX_VALUE = 2.0**40

# Tokens whose lengths are looked at together: a check costs as much in calls as in arithmetic. Tokens of 16 bits are
# copied, and a copy that fits the cache is read again from there.
_STRETCH, _COPIED_STRETCH = 16384, 2048

# Below so many tokens the checks cost more than the passes they spare.
_FEWEST = 32


def bounded_powers(feature_map: FeatureMap, tokens: Tensor, S: Tensor) -> Powers | None:
    """The map's exponents taken apart, where tokens (B, H, …, L, D) are many enough for that to pay."""
    if tokens.shape[-2] < _FEWEST or not S.numel():
        return None
    powers = feature_map.powers(S.dtype)
    # The map itself refuses heads that it has no statistics of.
    fits = powers is not None and powers.lowest_term(LIMIT).numel() in (1, S.shape[1])
    return powers if fits else None


class KeyBlock(NamedTuple):
    """A block of a stretch's keys."""

    tokens: Tensor  # (B, H, n, D)
    values: Tensor  # (B, H, n, Dv)
    weight: Tensor  # u, (B, H, n)

    def weighted_values(self, space: Workspace) -> Tensor:
        """u·v: (B·H, n, Dv)."""
        out = space.buffer("weighted", *self.values.shape)
        return torch.mul(self.values, self.weight.unsqueeze(-1), out=out).flatten(0, 1)


class BoundedKeys(NamedTuple):
    """A stretch of keys relative to one exponent per head; tokens and values may lie in a buffer, until the next."""

    c: Tensor  # (B, H)
    whole: KeyBlock  # weights of masked keys are 0
    fits: Tensor  # (B, H) bool: heads where it bounds everything; elsewhere nothing here is of use

    def blocks(self, stretch: Sequence[slice]) -> list[KeyBlock]:
        """Block by block."""
        return [KeyBlock(*x) for x in zip(*(parts(x, stretch, 2) for x in self.whole), strict=True)]


def common_exponent(m: Tensor) -> tuple[Tensor, Tensor]:
    """The exponent (B, H) of sums whose features share one, and which heads (B, H) do."""
    c = m[..., 0]
    return c, (m == c.unsqueeze(-1)).all(-1)


def bounded_keys(powers: Powers, keys: KeyBlocks, stretch: slice, m: Tensor) -> BoundedKeys:
    """A stretch of keys after sums with exponents m (B, H, M), which are moved to one in their midst."""
    before, is_common = common_exponent(m)
    before = torch.where(is_common, before, m.mean(-1))
    tokens, values = keys.tokens(stretch), keys.values(stretch)
    masked, bias = keys.masked(stretch), keys.bias(stretch)
    term = powers.term(tokens)
    # Two passes that keep nothing: magnitudes would be another block of memory.
    fits = fits_rows(powers, term) & (values.amax((-2, -1)) <= MAX_VALUE) & (values.amin((-2, -1)) >= -MAX_VALUE)
    log = term if bias is None else term + bias
    peak = log.amax(-1)
    c = torch.where(peak > before + RISE, peak, before)
    log = log - c.unsqueeze(-1)
    live = log if masked is None else log.masked_fill(masked, 0)
    # A stretch without live keys is left to the general form, which has nothing to do there.
    fits = fits & (live.amin(-1) >= -DEPTH) & (peak > -torch.inf)
    return BoundedKeys(c, KeyBlock(tokens, values, log.exp_()), fits)


def fits_rows(powers: Powers, term: Tensor) -> Tensor:
    """(B, H): heads whose rows, of terms (B, H, …), are short enough for all their powers."""
    return term.flatten(2).amin(-1) >= powers.lowest_term(LIMIT)


def fits_sums(S: Tensor, z: Tensor) -> Tensor:
    """(B, H): heads whose sums (B, H, R, Dv) and (B, H, R) may be read by bounded queries, and kept."""
    low, high = z.aminmax(dim=-1)
    return (low >= math.exp(-FLOOR)) & (high <= math.exp(DEPTH)) & are_moderate(S, z)


def are_moderate(S: Tensor, z: Tensor) -> Tensor:
    """(B, H): heads whose sums are those of values of at most MAX_VALUE."""
    return (S.abs().amax(-1) <= MAX_VALUE * z).all(-1)


def fits_denominators(den: Tensor) -> Tensor:
    """(B, H): heads whose denominators (B, H, …) all lie in the range."""
    low, high = den.flatten(2).aminmax(dim=-1)
    return (low >= math.exp(-DEPTH)) & (high <= math.exp(DEPTH))


def write_powers(powers: Powers, x: Tensor, name: str, space: Workspace) -> Tensor:
    """2^p of tokens (B, H, n, D) or (B, H, G, n, D): (B·H, G·n, R)."""
    # Queries of a group side by side cost a copy, which a map of one set for all heads does not need.
    x = x.flatten(2, 3) if x.ndim == 5 and (powers.is_by_head or x.shape[2] == 1) else x
    num_features = powers.weights.shape[-1] * (1 + powers.is_paired)
    p = powers.write(x, space.buffer(name, *x.shape[:-1], num_features)).exp2_().flatten(0, 1)
    return p if p.ndim == 3 else p.flatten(1, 2)


def store_bounded(out: Tensor, den: Tensor, num: Tensor, total: Tensor) -> None:
    """Write a block's num/total and total (B·H, 1, G·n), 0 nowhere, to (B, H, G, n, Dv) and (B, H, G, n)."""
    den.copy_(total.view(den.shape))
    num, total = num.view(out.shape), total.view(*den.shape, 1)
    if out.dtype == num.dtype:
        torch.div(num, total, out=out)
    else:
        out.copy_(num.div_(total))


def stretches(cut: Sequence[slice], tokens: Tensor, S: Tensor) -> list[list[slice]]:
    """Consecutive blocks of tokens in lists that are looked at together, before they enter or read sums."""
    length = _STRETCH if tokens.dtype == S.dtype else _COPIED_STRETCH
    return lists(cut, max(length // max(cut[0].stop, 1), 1) if cut else 1)


def lists(cut: Sequence[slice], count: int) -> list[list[slice]]:
    """Consecutive blocks, so many in each list but the last."""
    return [list(cut[first : first + count]) for first in range(0, len(cut), count)]


def whole(stretch: Sequence[slice]) -> slice:
    """All tokens of consecutive blocks."""
    return slice(stretch[0].start, stretch[-1].stop)


def parts(x: Tensor, stretch: Sequence[slice], dim: int) -> tuple[Tensor, ...]:
    """A stretch's x block by block, views along this dimension; all blocks but the last are of one size."""
    cut: tuple[Tensor, ...] = x.split(stretch[0].stop - stretch[0].start, dim)
    return cut


def by_head(
    fits: Tensor,
    bounded: Callable[[], Tensor | None],
    general: Callable[[], object],
    sums: Sequence[Tensor],
    written: Sequence[Tensor],
) -> Tensor:
    """Have `bounded` done for heads that fit, and `general` where it did not hold, which is what is returned, (B, H).

    Args:
        fits: (B, H) bool.
        bounded: adds to `sums`, writes `written` and returns the heads for which that holds; None for all that fit.
        general: the same for any head.
        sums: (B, H, …) tensors that both add to, in place.
        written: (B, H, …) tensors that both write over.
    """
    if not bool(fits.any()):
        general()
        return fits
    before = [x.clone() for x in sums]
    found = bounded()
    holds = fits if found is None else fits & found
    if bool(holds.all()):
        return holds
    chosen = [x.clone() for x in (*sums, *written)]
    for x, kept in zip(sums, before, strict=True):
        x.copy_(kept)
    general()
    for x, y in zip((*sums, *written), chosen, strict=True):
        x.copy_(torch.where(holds[(..., *[None] * (x.ndim - 2))], y, x))
    return holds
