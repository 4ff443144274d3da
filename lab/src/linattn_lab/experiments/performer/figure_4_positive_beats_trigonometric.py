"""Sines are exact where q and k agree, positive features where they oppose: which wins is a question of scale.

The relative variance of one estimated weight is (cosh D - 1)/m for sines and cosines, D = |x - y|², and (e^s - 1)/r for
positive features, s = |x + y|²; for independent Gaussian inputs s and D have the same distribution. At small scale the
sines' estimate is the better one; at large scale it makes weights of either sign, the normaliser crosses zero and the
error has no mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import UNIFORM, Axes, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.performer._figure_4 import (
    POSITIVE,
    POSITIVE_IID,
    SIGMAS,
    TRIGONOMETRIC,
    TRIGONOMETRIC_IID,
    at,
    lead,
    mean_error,
    median_at,
    median_error,
)

CLAIM = "Positive features approximate softmax attention with a lower error than trigonometric ones."
SOURCE = "Performer paper (arXiv 2009.14794), figure 4; uniform attention and the scale of the inputs are added"
AXES = Axes("features r", "mean square error of the output", log_x=True, log_y=True)

_MAPS = (TRIGONOMETRIC_IID, TRIGONOMETRIC, POSITIVE_IID, POSITIVE)


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    trials: int
    num_features: tuple[int, ...]
    sigmas: tuple[float, ...] = SIGMAS


QUICK = Config(trials=8, num_features=(64, 256), seconds=3)
FULL = Config(trials=15, num_features=(16, 32, 64, 128, 256, 512), seconds=22)


def rows(config: Config) -> Iterator[Measurement]:
    """Mean and median over trials at every scale and width."""
    for sigma in config.sigmas:
        for width in config.num_features:
            for name in (UNIFORM, *_MAPS):
                setting = (name, width, sigma, config.trials)
                yield Measurement(at(name, sigma), width, partial(mean_error, *setting))
                yield Measurement(median_at(name, sigma), width, partial(median_error, *setting))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Medians of both maps, drawn orthogonally: at every scale and width the positive one must be the lower."""
    cells = [
        (sigma, *pair)
        for sigma in SIGMAS
        for pair in zip(*(in_series(rows, median_at(name, sigma)) for name in (POSITIVE, TRIGONOMETRIC)), strict=True)
    ]
    worst, best = (choose(cells, key=lambda cell: lead(*cell[1:])) for choose in (min, max))
    margin = lead(*worst[1:])
    return decide(
        holds=margin > STANDARD_ERRORS,
        fails=margin < -STANDARD_ERRORS,
        figure=f"the scale σ of the inputs decides: medians of FAVOR+ and of sines and cosines are {_words(*worst)}, "
        f"{_words(*best)}",
        tolerance=f"medians, for the sines' error has no mean once their normaliser may cross zero; the worst cell "
        f"decides, by {STANDARD_ERRORS:.0f} standard errors of its logarithm over trials (here {margin:.1f})",
    )


def _words(sigma: float, positive: FigureRow, trigonometric: FigureRow) -> str:
    """Both medians of a cell."""
    return f"with σ = {sigma} and r = {positive.x:.0f} {positive.value:.2g} against {trigonometric.value:.2g}"
