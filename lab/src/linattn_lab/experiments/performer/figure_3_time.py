"""Time of FAVOR+ grows with the length, that of attention that stores its L × L weights with its square.

A call of FAVOR+ takes 8·L·r·d operations a head, exact attention 4·L²·d: equal at L = 2r. Timed side by side in one
process, after the results were found right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from linattn.methods.measures import seconds
from linattn_lab.experiments.experiment import EXACT, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import decide, in_series
from linattn_lab.experiments.performer._figure_3 import (
    CAUSAL,
    CONTENDERS,
    OPTIMUM,
    PASSES,
    PERFORMER,
    TRANSFORMER,
    call,
    contenders,
    growth,
    series,
    verify,
)

CLAIM = "The time of the Performer grows linearly with the length, that of the Transformer quadratically."
SOURCE = "Performer paper (arXiv 2009.14794), section 4.1 and figure 3, attention alone, on a CPU"
AXES = Axes("tokens L", "seconds", log_x=True, log_y=True)

_QUADRATIC = (EXACT, TRANSFORMER)
_DECIDING = 3
_MIDDLE, _BAND = 1.5, 0.25


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; the quadratic ones stop earlier."""

    lengths: tuple[int, ...]
    longest_quadratic: int
    repeats: int


QUICK = Config((512, 1024, 2048, 4096), longest_quadratic=2048, repeats=2, seconds=11)
FULL = Config((512, 1024, 2048, 4096, 8192, 16384), longest_quadratic=4096, repeats=5, seconds=57)


def rows(config: Config) -> Iterator[Measurement]:
    """Every contender at every length, forward and with backward."""
    for passes in PASSES:
        for length in config.lengths:
            for name in _present(config, length):
                yield Measurement(series(name, passes), length, partial(_time, config, name, length, passes))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Slopes at the greatest lengths: FAVOR+ on the side of 1, the Transformer on that of 2."""
    steepest = max(growth(rows, name, passes, _DECIDING) for name in (PERFORMER, CAUSAL) for passes in PASSES)
    flattest = min(growth(rows, TRANSFORMER, passes, _DECIDING) for passes in PASSES)
    blockwise = growth(rows, EXACT, PASSES[0], _DECIDING)
    return decide(
        holds=steepest < _MIDDLE - _BAND and flattest > _MIDDLE + _BAND,
        fails=steepest > _MIDDLE or flattest < _MIDDLE,
        figure=f"time grows at most as L^{steepest:.2f} with FAVOR+ and at least as L^{flattest:.2f} where the weights "
        f"are kept; against exact attention block by block, which grows as L^{blockwise:.2f} "
        f"forward, {_break_even(rows)}; {_floor(rows)}",
        tolerance=f"slopes over the greatest {_DECIDING} lengths, on the right side of {_MIDDLE} by {_BAND}: over two "
        f"doublings a machine would have to change its speed by a factor {4**_BAND:.2f} to feign that",
    )


def _break_even(rows: Sequence[FigureRow]) -> str:
    """From which length FAVOR+ is the faster forward, by straight lines between logarithms."""
    exact, favor = (in_series(rows, series(name, PASSES[0])) for name in (EXACT, PERFORMER))
    leads = [(row.x, math.log(row.value / other.value)) for row, other in zip(exact, favor, strict=False)]
    for (x, lead), (next_x, next_lead) in pairwise(leads):
        if lead <= 0 < next_lead:
            at = math.exp(math.log(x) + math.log(next_x / x) * lead / (lead - next_lead))
            return f"it breaks even at {at:,.0f} tokens"
    return f"it is {'faster' if leads[0][1] > 0 else 'slower'} at every length measured"


def _floor(rows: Sequence[FigureRow]) -> str:
    """How far from the floor FAVOR+ is."""
    favor, optimum = (in_series(rows, series(name, PASSES[0]))[-1] for name in (PERFORMER, OPTIMUM))
    return f"returning the values would take {optimum.value / favor.value:.1%} of FAVOR+'s time"


def _time(config: Config, name: str, length: int, passes: str) -> Figure:
    """Seconds of the fastest call: whatever disturbs one only slows it."""
    return Figure(min(_times(config, passes)[f"{name} at {length}"]))


@lru_cache(maxsize=4)
def _times(config: Config, passes: str) -> dict[str, list[float]]:
    """Seconds of every contender at every length, all in turn: a machine that grows busier is slower for all."""
    verify()
    built = contenders()
    return seconds(
        {
            f"{name} at {length}": call(built[name], length, passes)
            for length in config.lengths
            for name in _present(config, length)
        },
        repeats=config.repeats,
    )


def _present(config: Config, length: int) -> list[str]:
    """Who runs at a length."""
    return [name for name in CONTENDERS if name not in _QUADRATIC or length <= config.longest_quadratic]
