"""Memory of FAVOR+ grows with the length, that of a Transformer that stores its L × L weights with its square.

Exact attention need not keep them: computed block by block, as torch does today, it grows linearly too. What was an
advantage in memory when the paper was written is one in time alone. Figures are peaks of resident memory during a
call, results included, in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from linattn_lab.experiments.experiment import EXACT, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import decide, in_series
from linattn_lab.experiments.performer._figure_3 import (
    CAUSAL,
    CONTENDERS,
    PASSES,
    PERFORMER,
    TRANSFORMER,
    extra_bytes,
    growth,
    series,
    verify,
)

CLAIM = "The memory of the Performer grows linearly with the length, that of the Transformer quadratically."
SOURCE = "Performer paper (arXiv 2009.14794), section 4.1 and figure 3, attention alone, on a CPU"
AXES = Axes("tokens L", "bytes", log_x=True, log_y=True)

_DECIDING = 2
_MIDDLE, _BAND = 1.5, 0.25


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; the Transformer stops earlier, its memory being the machine's limit."""

    lengths: tuple[int, ...]
    longest_quadratic: int


QUICK = Config((1024, 2048), longest_quadratic=2048, seconds=12)
FULL = Config((1024, 2048, 4096, 8192, 16384), longest_quadratic=4096, seconds=65)


def rows(config: Config) -> Iterator[Measurement]:
    """Every contender at every length, forward and with backward."""
    for name, length, passes in _cases(config):
        yield Measurement(series(name, passes), length, partial(_memory, config, (name, length, passes)))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Slopes at the greatest lengths: FAVOR+ on the side of 1, the Transformer on that of 2."""
    steepest = max(growth(rows, name, passes, _DECIDING) for name in (PERFORMER, CAUSAL) for passes in PASSES)
    flattest = min(growth(rows, TRANSFORMER, passes, _DECIDING) for passes in PASSES)
    blockwise = growth(rows, EXACT, PASSES[0], _DECIDING)
    exact, favor = (in_series(rows, series(name, PASSES[0]))[-1] for name in (EXACT, PERFORMER))
    return decide(
        holds=steepest < _MIDDLE - _BAND and flattest > _MIDDLE + _BAND,
        fails=steepest > _MIDDLE or flattest < _MIDDLE,
        figure=f"memory grows at most as L^{steepest:.2f} with FAVOR+ and at least as L^{flattest:.2f} where the "
        f"weights are kept; but exact attention block by block grows as L^{blockwise:.2f}, "
        f"{exact.value / 1e6:.0f} MB against {favor.value / 1e6:.0f} MB of FAVOR+ at {favor.x:,.0f} tokens",
        tolerance=f"slopes over the last doubling, on the right side of {_MIDDLE} by {_BAND}: pages and an allocator's "
        f"remainders, some MB, would have to be {2**_BAND - 1:.0%} of a figure to feign that",
    )


def _memory(config: Config, case: tuple[str, int, str]) -> Figure:
    """Bytes of one case."""
    return Figure(_all(config)[case])


@lru_cache(maxsize=2)
def _all(config: Config) -> dict[tuple[str, int, str], int]:
    """Bytes of every case: to start a process costs more than most of them."""
    verify()
    cases = _cases(config)
    return dict(zip(cases, extra_bytes(cases), strict=True))


def _cases(config: Config) -> list[tuple[str, int, str]]:
    """Contender, length and passes."""
    return [
        (name, length, passes)
        for passes in PASSES
        for length in config.lengths
        for name in CONTENDERS
        if name != TRANSFORMER or length <= config.longest_quadratic
    ]
