"""Keeping one draw is the more accurate after tuning; redrawing makes the weights depend less on the draw.

Measured: the features drawn anew every few steps, against one draw that is kept.

Features are part of the network: it adapts to a draw that stays, and no draw is so unlucky that it could not. Every
redraw undoes part of that. What redrawing buys is another thing: weights that depend less on the draw, which shows
when they are used under one they have never seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from linattn.feature_maps import FavorPlus
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import EXACT, UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import mean_figure, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.performer._recall import (
    HEAD_DIM,
    Recall,
    accuracy,
    attention_with,
    average,
    pretrained,
    train,
    training,
)

CLAIM = "The random features have to be redrawn during training, lest an unlucky draw spoils it."
SOURCE = "Performer paper (arXiv 2009.14794), section 4.2 and figure 5 (right), on a task without data of its own"
AXES = Axes("features r", "share of right answers after tuning", log_x=True)

_KEPT, _REDRAWN = "one draw", "redrawn"
_UNSEEN, _LEAST = ", tested with another draw", ", worst run"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    task: Recall
    num_features: tuple[int, ...]
    runs: int
    steps: int
    interval: int


QUICK = Config(Recall(16, 8, 400), num_features=(32,), runs=5, steps=80, interval=20, seconds=12)
FULL = Config(Recall(32, 16, 1000), num_features=(32, 128), runs=8, steps=200, interval=50, seconds=170)


def rows(config: Config) -> Iterator[Measurement]:
    """Accuracy of both at every width, with the draw they ended with and with one they never saw."""
    for width in config.num_features:
        for series in (EXACT, UNIFORM):
            yield Measurement(series, width, partial(_baseline, config, series))
        for series in (_KEPT, _REDRAWN):
            for suffix in ("", _UNSEEN, _LEAST):
                yield Measurement(f"{series}{suffix}", width, partial(_accuracy, config, series, suffix, width))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The difference of the means at every width, each tested with the draw its tuning ended with."""
    pairs = list(zip(in_series(rows, _KEPT), in_series(rows, _REDRAWN), strict=True))
    leads = [(redrawn.value - kept.value) / _noise(kept, redrawn) for kept, redrawn in pairs]
    kept, redrawn = pairs[0]
    least = in_series(rows, _KEPT + _LEAST)[0]
    unseen = [in_series(rows, series + _UNSEEN)[0].value for series in (_KEPT, _REDRAWN)]
    return decide(
        holds=min(leads) > STANDARD_ERRORS,
        fails=min(leads) < -STANDARD_ERRORS,
        figure=f"{kept.x:.0f} features answer {kept.value:.1%} with one draw, {least.value:.1%} with the unluckiest "
        f"and {redrawn.value:.1%} when redrawn; with a draw not seen in tuning {unseen[0]:.1%} and {unseen[1]:.1%}: "
        f"redrawing buys some independence of the draw",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors over runs at the width where redrawing does worst (here "
        f"{min(leads):.1f}); each with the draw its tuning ended with",
    )


def _noise(kept: FigureRow, redrawn: FigureRow) -> float:
    """Standard error of a difference; runs that all end alike still have that of a single answer."""
    return max(math.hypot(kept.standard_error or 0.0, redrawn.standard_error or 0.0), 1e-4)


def _accuracy(config: Config, series: str, suffix: str, width: int) -> Figure:
    """Mean over runs with its standard error, or the least of them."""
    seen, unseen = _runs(config, series, width)
    shares = unseen if suffix == _UNSEEN else seen
    if suffix == _LEAST:
        return Figure(shares.min().item())
    return mean_figure(shares)


@lru_cache(maxsize=32)
def _runs(config: Config, series: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of right answers of every run: with the last draw of its tuning, and with one of another seed."""
    seen, unseen = [], []
    for run in range(config.runs):
        favor = FavorPlus(HEAD_DIM, width, seed=seed("redraw", width, run, 0))
        network, attend = pretrained(config.task), attention_with(favor)
        for step in training(network, config.task, attend, "redraw", run):
            if step == config.steps:
                break
            if series == _REDRAWN and step % config.interval == 0:
                favor.redraw(seed("redraw", width, run, step))
        seen.append(accuracy(network, config.task, attend).mean())
        favor.redraw(seed("redraw", width, run, "unseen"))
        unseen.append(accuracy(network, config.task, attend).mean())
    return torch.stack(seen), torch.stack(unseen)


@lru_cache(maxsize=4)
def _baseline(config: Config, series: str) -> Figure:
    """Exact attention, or averaging, after as many steps of tuning."""
    network, attend = pretrained(config.task), softmax_attention if series == EXACT else average
    train(network, config.task, attend, config.steps, "redraw", series)
    return mean_figure(accuracy(network, config.task, attend))
