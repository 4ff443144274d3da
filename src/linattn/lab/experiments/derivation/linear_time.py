"""Time grows as N rather than as N², once N is large enough to pay for the features.

Multiplications alone: 2·N·r·(D + Dv) against N²·(D + Dv), equal at N = 2r. Exponentials, and the better use exact
attention makes of a processor, move the break-even; the source does not mention that there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from linattn.attention import linear_attention, softmax_attention
from linattn.feature_maps import FavorPlus
from linattn.lab.experiments.experiment import EXACT, Axes, Figure, Measurement, Row, Verdict
from linattn.lab.experiments.inputs import Tokens, gaussian_tokens, seed
from linattn.lab.experiments.judging import decide, in_series, slope
from linattn.lab.timing import seconds

CLAIM = "Linear attention reduces the complexity from O(N²) to O(N)."
SOURCE = 'derivation, section "Why Is Expanding |q+k|² the Key?"'
AXES = Axes("tokens N", "seconds of one call", log_x=True, log_y=True)

LINEAR = "linear attention"

# Slopes are taken over the longest lengths: below them what a call costs at any length weighs in.
_LONGEST = 3
# A slope of 1.5 would be neither. A machine that is busy for part of the run moves a slope over a factor of four in
# length by log 1.5/log 4 = 0.3 if it slows one end by half; the least of several repeats is rarely that far off.
_LINEAR_BELOW, _QUADRATIC_ABOVE = 1.3, 1.6
# Far above what float32 rounds, far below what a wrong result differs by.
_AGREEMENT = 1e-4


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment."""

    num_tokens: tuple[int, ...]
    repeats: int
    head_dim: int = 64
    num_features: int = 64
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(num_tokens=(128, 256, 512, 1024, 2048, 4096, 8192), repeats=5, seconds=3)
FULL = Config(num_tokens=(128, 256, 512, 1024, 2048, 4096, 8192, 16384), repeats=10, seconds=20)


def rows(config: Config) -> Iterator[Measurement]:
    """Both at every length."""
    for count in config.num_tokens:
        yield Measurement(LINEAR, count, partial(_seconds, config, LINEAR, count, 1))
        yield Measurement(EXACT, count, partial(_seconds, config, EXACT, count, 2))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Slopes in log-log of the longest lengths."""
    linear, exact = in_series(rows, LINEAR), in_series(rows, EXACT)
    (low, _), (high, _) = slope(linear[-_LONGEST:]), slope(exact[-_LONGEST:])
    faster = [one.x for one, other in zip(linear, exact, strict=True) if one.value < other.value]
    even = f"linear is the faster from {min(faster):,.0f} tokens on" if faster else "linear is never the faster"
    return decide(
        holds=low < _LINEAR_BELOW and high > _QUADRATIC_ABOVE,
        fails=low > _QUADRATIC_ABOVE or high < _LINEAR_BELOW,
        figure=f"up to {linear[-1].x:,.0f} tokens linear attention takes N^{low:.2f}, exact attention N^{high:.2f}; "
        f"{even}, where multiplications are equal at {2 * QUICK.num_features}",
        tolerance=f"over the longest {_LONGEST} lengths, the least of the repeats: below {_LINEAR_BELOW} and above "
        f"{_QUADRATIC_ABOVE}, as a machine slowed by half at one end of them moves a slope by 0.3",
    )


def _seconds(config: Config, name: str, num_tokens: int, power: int) -> Figure:
    """The least time of the repeats; expected is the claimed power through the longest length."""
    times, longest = _times(config), max(config.num_tokens)
    return Figure(times[name, num_tokens], expected=times[name, longest] * (num_tokens / longest) ** power)


@lru_cache(maxsize=1)
def _times(config: Config) -> dict[tuple[str, int], float]:
    """Seconds by contender and length, all of them interleaved; the least is what nothing else disturbed."""
    favor = FavorPlus(config.head_dim, config.num_features, seed=seed("time", config.seed))
    _require_agreement(favor, _tokens(config, min(config.num_tokens)))
    calls: dict[str, Callable[[], object]] = {}
    for count in config.num_tokens:
        tokens = _tokens(config, count)
        calls[f"{LINEAR} {count}"] = partial(linear_attention, *tokens, favor, backend="blocked")
        calls[f"{EXACT} {count}"] = partial(softmax_attention, *tokens)
    with torch.no_grad():
        found = seconds(calls, repeats=config.repeats)
    return {(name, count): min(found[f"{name} {count}"]) for name in (LINEAR, EXACT) for count in config.num_tokens}


def _tokens(config: Config, num_tokens: int) -> Tokens:
    """Tokens in single precision, as attention is run."""
    return Tokens(*(x.float() for x in gaussian_tokens(num_tokens, config.head_dim, 0.5, "time", config.seed)))


def _require_agreement(favor: FavorPlus, tokens: Tokens) -> None:
    """Refuse to time a wrong result."""
    query, key, value = (x.double() for x in tokens)
    found = linear_attention(*tokens, favor, backend="blocked")
    truth = linear_attention(query, key, value, favor, backend="reference")
    error = ((found - truth).norm() / truth.norm()).item()
    if not error <= _AGREEMENT:
        raise RuntimeError(f"linear attention is off by {error:.1e}, at most {_AGREEMENT:.0e} allowed; nothing timed")
