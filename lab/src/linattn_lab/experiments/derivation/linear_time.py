"""Time grows as N, that of exact attention as N²; features pay from some length on.

Multiplications alone: 2·N·r·(D + Dv) against N²·(D + Dv), equal at N = 2r. Exponentials, and the better use exact
attention makes of a processor, move the break-even; the source does not mention that there is one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus
from linattn.methods.measures import seconds
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import EXACT, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, overall_relative_error, seed
from linattn_lab.experiments.judging import decide, in_series, slope, value_at

CLAIM = "Linear attention reduces the complexity from O(N²) to O(N)."
SOURCE = 'derivation, section "Why Is Expanding |q+k|² the Key?"'
AXES = Axes("tokens N", "seconds of one call", log_x=True, log_y=True)

LINEAR = "linear attention"

# Slopes are taken over the longest lengths: below them what a call costs at any length weighs in.
_LONGEST = 3
# A slope of 1.5 would be neither. A machine slowed by half at one end of a factor of four in length moves a slope by
# log 1.5/log 4 = 0.3; lengths take turns, so that it is rarely slowed at one end alone.
_LINEAR_BELOW, _QUADRATIC_ABOVE = 1.3, 1.6
# Far above what float32 rounds, far below what a wrong result differs by.
_AGREEMENT = 1e-4


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    linear_tokens: tuple[int, ...]
    exact_tokens: tuple[int, ...]
    linear_repeats: int
    exact_repeats: int
    head_dim: int = 64
    num_features: int = 64


# The longest calls last longer than the slices of time a busy processor hands out, which would fall on long calls only.
QUICK = Config(
    linear_tokens=tuple(2**n for n in range(7, 17)),
    exact_tokens=tuple(2**n for n in range(7, 14)),
    linear_repeats=15,
    exact_repeats=5,
    seconds=4,
)
FULL = Config(
    linear_tokens=tuple(2**n for n in range(7, 18)),
    exact_tokens=tuple(2**n for n in range(7, 15)),
    linear_repeats=25,
    exact_repeats=9,
    seconds=30,
)


def rows(config: Config) -> Iterator[Measurement]:
    """Both at every length, the linear one further."""
    for count in config.linear_tokens:
        yield Measurement(LINEAR, count, partial(_linear, config, count))
    for count in config.exact_tokens:
        yield Measurement(EXACT, count, partial(_exact, config, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Slopes in log-log of the longest lengths."""
    linear, exact = in_series(rows, LINEAR), in_series(rows, EXACT)
    (low, _), (high, _) = slope(linear[-_LONGEST:]), slope(exact[-_LONGEST:])
    faster = [row.x for row in exact if value_at(rows, LINEAR, row.x).value < row.value]
    even = f"linear is the faster from {min(faster):,.0f} tokens on" if faster else "linear is never the faster"
    return decide(
        holds=low < _LINEAR_BELOW and high > _QUADRATIC_ABOVE,
        fails=low > _QUADRATIC_ABOVE or high < _LINEAR_BELOW,
        figure=f"linear attention takes N^{low:.2f} up to {linear[-1].x:,.0f} tokens, exact attention N^{high:.2f} up "
        f"to {exact[-1].x:,.0f}; {even}, where multiplications are equal at {2 * QUICK.num_features}",
        tolerance=f"over the longest {_LONGEST} lengths, medians of the repeats: below {_LINEAR_BELOW} and above "
        f"{_QUADRATIC_ABOVE}, as a machine slowed by half at one end of them moves a slope by 0.3",
    )


def _linear(config: Config, num_tokens: int) -> Figure:
    """Median seconds; expected is a straight line through the longest length."""
    times, longest = _linear_times(config), max(config.linear_tokens)
    return Figure(times[num_tokens], expected=times[longest] * num_tokens / longest)


def _exact(config: Config, num_tokens: int) -> Figure:
    """Median seconds; expected is a parabola through the longest length."""
    times, longest = _exact_times(config), max(config.exact_tokens)
    return Figure(times[num_tokens], expected=times[longest] * (num_tokens / longest) ** 2)


@lru_cache(maxsize=1)
def _linear_times(config: Config) -> dict[int, float]:
    """Median seconds of linear attention by length."""
    favor = FavorPlus(config.head_dim, config.num_features, seed=seed("time", config.seed))
    _require_agreement(favor, _tokens(config, min(config.linear_tokens)))
    inputs = {count: _tokens(config, count) for count in config.linear_tokens}
    return _medians(lambda x: linear_attention(*x, favor, backend="blocked"), inputs, config.linear_repeats)


@lru_cache(maxsize=1)
def _exact_times(config: Config) -> dict[int, float]:
    """Median seconds of exact attention by length."""
    inputs = {count: _tokens(config, count) for count in config.exact_tokens}
    return _medians(lambda x: softmax_attention(*x), inputs, config.exact_repeats)


def _medians(attend: Callable[[Tokens], Tensor], inputs: Mapping[int, Tokens], repeats: int) -> dict[int, float]:
    """Seconds by length, all lengths in turn: a slope compares lengths, and what slows one slows all."""
    with torch.no_grad():
        found = seconds({str(count): partial(attend, tokens) for count, tokens in inputs.items()}, repeats=repeats)
    return {count: statistics.median(found[str(count)]) for count in inputs}


def _tokens(config: Config, num_tokens: int) -> Tokens:
    """Tokens in single precision, as attention is run."""
    return Tokens(*(x.float() for x in gaussian_tokens(num_tokens, config.head_dim, 0.5, "time", config.seed)))


def _require_agreement(favor: FavorPlus, tokens: Tokens) -> None:
    """Refuse to time a wrong result."""
    query, key, value = (x.double() for x in tokens)
    truth = linear_attention(query, key, value, favor, backend="reference")
    error = overall_relative_error(linear_attention(*tokens, favor, backend="blocked"), truth)
    if not error <= _AGREEMENT:
        raise RuntimeError(f"linear attention is off by {error:.1e}, at most {_AGREEMENT:.0e} allowed; nothing timed")
