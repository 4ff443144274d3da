"""Whether FAVOR+ is better than no attention at all is a question of the scale of queries and keys.

Averaging the values costs nothing, and its error grows with the spread τ of the logits only as e^{τ²} - 1; the relative
variance of a positive random feature grows as e^s, s = 2τ√d. Figure 4 of the paper has no such baseline. Beside it
stand maps of no more features: two with lengths fixed, two elementwise ones, and the Taylor polynomial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import UNIFORM, Axes, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.performer._figure_4 import FIXED, POSITIVE, RANDOM, SIGMAS, lead, mean_error, median_error

CLAIM = "FAVOR+ with 256 features approximates softmax attention: it is better than averaging the values."
SOURCE = "Performer paper (arXiv 2009.14794), figure 4 and appendix A.3; the baseline is added"
AXES = Axes("deviation σ of the entries of queries and keys", "mean square error of the output", log_y=True)

_WIDTH = 256
_JUDGED = f"{POSITIVE}, r = {_WIDTH}, median"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    trials: int
    num_features: tuple[int, ...]
    sigmas: tuple[float, ...] = SIGMAS


QUICK = Config(trials=8, num_features=(64, _WIDTH), seconds=5)
FULL = Config(trials=15, num_features=(16, 32, 64, 128, _WIDTH, 512), seconds=30)


def rows(config: Config) -> Iterator[Measurement]:
    """Every map at every scale, the random ones at every width."""
    for sigma in config.sigmas:
        for name in (UNIFORM, *FIXED):
            yield Measurement(name, sigma, partial(mean_error, name, 0, sigma, config.trials))
        for name in RANDOM:
            for width in config.num_features:
                setting = (name, width, sigma, config.trials)
                yield Measurement(f"{name}, r = {width}", sigma, partial(mean_error, *setting))
        setting = (POSITIVE, _WIDTH, sigma, config.trials)
        yield Measurement(_JUDGED, sigma, partial(median_error, *setting))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The median error of FAVOR+ against averaging, at every scale."""
    cells = list(zip(in_series(rows, _JUDGED), in_series(rows, UNIFORM), strict=True))
    leads = [lead(*cell) for cell in cells]
    figures = ", ".join(f"{favor.value:.2g} against {uniform.value:.2g} with σ = {favor.x}" for favor, uniform in cells)
    return decide(
        holds=min(leads) > STANDARD_ERRORS,
        fails=min(leads) < -STANDARD_ERRORS,
        figure=f"the scale decides: the median error of FAVOR+ with r = {_WIDTH} and that of averaging are {figures}",
        tolerance=f"medians over trials, for the tails of e^s reach the means; the worst scale decides, by "
        f"{STANDARD_ERRORS:.0f} standard errors of the logarithm (here {min(leads):.1f})",
    )
