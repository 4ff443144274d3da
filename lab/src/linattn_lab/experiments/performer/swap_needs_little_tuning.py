"""A network trained with exact attention loses much of its accuracy under FAVOR+, and regains it in a few steps.

Recall needs sharp attention, hence large queries and keys, where positive features are poor. But the loss is one of
estimation, not of knowledge: a few steps adapt the weights to the draw they are given. The same steps from random
weights, or with averaging in the place of attention, lead nowhere near.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.experiment import EXACT, UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import over_runs
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.performer._recall import (
    Recall,
    attention_with,
    baseline,
    regained,
    swap_map,
    swapped,
    tuning_curve,
    untrained,
)

CLAIM = (
    "A pretrained Transformer's weights, put under FAVOR+, regain their accuracy in a small fraction of its training."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 4.2 and figure 5 (left), on a task without data of its own"
AXES = Axes("steps of tuning after the swap", "share of right answers")

_FAVOR, _SCRATCH = "FAVOR+, r = ", "FAVOR+ from random weights, r = "


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; the last of the steps is 15 % of the training with exact attention."""

    task: Recall
    num_features: tuple[int, ...]
    steps: tuple[int, ...]
    draws: int


QUICK = Config(Recall(16, 8, 400), num_features=(32, 128), steps=(0, 15, 30, 60), draws=3, seconds=15)
FULL = Config(
    Recall(32, 16, 1000), num_features=(32, 128, 512, 1024), steps=(0, 15, 30, 60, 100, 150), draws=3, seconds=180
)


def rows(config: Config) -> Iterator[Measurement]:
    """Accuracy under every attention after every number of steps."""
    swapped = [f"{_FAVOR}{width}" for width in config.num_features]
    for series in (EXACT, UNIFORM, f"{_SCRATCH}{config.num_features[0]}", *swapped):
        for step in config.steps:
            yield Measurement(series, step, partial(_accuracy, config, series, step))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Which part of the drop is regained at every width."""
    exact = in_series(rows, EXACT)[0].value
    curves = [in_series(rows, series) for series in sorted({row.series for row in rows}) if series.startswith(_FAVOR)]
    found = [(regained(curve, exact), curve) for curve in curves]
    (share, error), worst = min(found, key=lambda one: one[0][0])
    steps = f"{worst[-1].x:.0f} steps"
    return decide(
        holds=all(part - STANDARD_ERRORS * noise > 0.5 for (part, noise), _ in found),
        fails=any(part + STANDARD_ERRORS * noise < 0.5 for (part, noise), _ in found),
        figure=f"exact attention answers {exact:.1%}; {worst[0].series.removeprefix(_FAVOR)} features answer "
        f"{worst[0].value:.1%} after the swap and {worst[-1].value:.1%} after {steps}: {share:.0%} of the drop; "
        f"averaging answers {in_series(rows, UNIFORM)[-1].value:.1%} after {steps}",
        tolerance=f"at every width more than half of the drop, the middle between nothing and all, by "
        f"{STANDARD_ERRORS:.0f} standard errors over draws and test sequences (here {error:.1%} of the drop)",
    )


def _accuracy(config: Config, series: str, step: int) -> Figure:
    """Mean over draws, or over one network's test sequences where nothing is drawn."""
    return _curve(config, series)[step]


@lru_cache(maxsize=32)
def _curve(config: Config, series: str) -> dict[int, Figure]:
    """Accuracy after every number of steps."""
    task, steps = config.task, config.steps
    if series in (EXACT, UNIFORM):
        runs = [baseline(task, series, steps)]
    elif series.startswith(_SCRATCH):
        width = int(series.removeprefix(_SCRATCH))
        runs = [
            tuning_curve(
                untrained(task, "swap", draw), task, attention_with(swap_map(FavorPlus, width, draw)), steps, draw
            )
            for draw in range(config.draws)
        ]
    else:
        width = int(series.removeprefix(_FAVOR))
        runs = [swapped(task, FavorPlus, width, draw, steps) for draw in range(config.draws)]
    return {step: over_runs([run[step] for run in runs]) for step in steps}
