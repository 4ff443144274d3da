"""A small kernel value is not what makes positive features accurate: a small |x + y|² is.

For one row and |x| = |y| = l at an angle θ, with SM = exp(l²·cos θ),

    MSE+ = SM²·(exp(2l²(1 + cos θ)) - 1) ≈ exp(2l²(1 + 2 cos θ))

while SM → 0 whenever cos θ < 0. So MSE+ → 0 needs |x|² + |y|² + 4x·y → -∞: beyond 120°. From 90° to 120° the kernel
vanishes and the error grows without bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import decide, in_series
from linattn_lab.experiments.pairs import Pair, Projection, closed_error, paper_error

CLAIM = (
    "As the softmax kernel tends to 0 the mean squared error of trigonometric features tends to infinity, that of "
    "positive features to 0."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 3, what follows lemma 2"
AXES = Axes("|x| = |y|", "kernel, and mean squared error of one row", log_y=True)

_KERNEL = "softmax kernel"
_AT = "{}, {}°"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment: an angle on either side of 120°."""

    degrees: tuple[int, ...] = (100, 140)
    lengths: tuple[float, ...] = (1, 2, 3, 4, 5)
    head_dim: int = 64


QUICK = Config(seconds=0.1)
FULL = Config(seconds=0.1)


def rows(config: Config) -> Iterator[Measurement]:
    """The kernel and both errors, in closed form, over the length."""
    for degrees in config.degrees:
        for length in config.lengths:
            pair = Pair(length, length, degrees)
            yield Measurement(_AT.format(_KERNEL, degrees), length, partial(Figure, pair.kernel))
            for name in ("trigonometric", "positive"):
                yield Measurement(_AT.format(name, degrees), length, partial(_error, config, name, pair))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Whether the errors go where the claim says while the kernel falls, at every angle."""
    refuted, borne_out = [], []
    for degrees in QUICK.degrees:
        kernel, trigonometric, positive = (
            [row.value for row in in_series(rows, _AT.format(name, degrees))]
            for name in (_KERNEL, "trigonometric", "positive")
        )
        vanishes = max(_growths(kernel)) < 0
        refuted.append(vanishes and (min(_growths(positive)) > 0 or max(_growths(trigonometric)) < 0))
        borne_out.append(vanishes and max(_growths(positive)) < 0 and min(_growths(trigonometric)) > 0)
    first, last = in_series(rows, _AT.format(_KERNEL, QUICK.degrees[0]))[:: len(QUICK.lengths) - 1]
    before, after = in_series(rows, _AT.format("positive", QUICK.degrees[0]))[:: len(QUICK.lengths) - 1]
    good = in_series(rows, _AT.format("positive", QUICK.degrees[1]))[-1]
    return decide(
        holds=all(borne_out),
        fails=any(refuted),
        figure=f"at {QUICK.degrees[0]}° the kernel falls from {first.value:.2g} to {last.value:.2g} as the lengths "
        f"grow from {first.x:.0f} to {last.x:.0f}, and the error of positive features rises from {before.value:.2g} to "
        f"{after.value:.2g}; at {QUICK.degrees[1]}° it falls to {good.value:.1g}: what it takes is "
        "|x|² + |y|² + 4x·y → -∞, an angle beyond 120° where the lengths are equal",
        tolerance="none: closed forms; refuted where an error moves the wrong way at every step while the kernel falls",
    )


def _growths(values: Sequence[float]) -> list[float]:
    """Logarithms of the ratios of neighbours."""
    return [math.log(after / before) for before, after in pairwise(values)]


def _error(config: Config, name: str, pair: Pair) -> Figure:
    """Mean squared error of one row."""
    return Figure(closed_error(name, pair, Projection(1, config.head_dim, "iid")), None, paper_error(name, pair))
