"""Under sines and cosines the normaliser of attention is a sum of either sign, and the network does not recover.

Where the sum comes close to zero the output and its gradients have no bound. Recall needs large queries and keys, so a
good part of the normalisers is negative from the first step on, and gradients say nothing of how to mend that. Positive
features of the same width, on the same sequences, regain what the swap has cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus, FeatureMap, Trigonometric, features
from linattn_lab.experiments.experiment import EXACT, UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import mean_figure, over_runs
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.performer._recall import (
    Network,
    Recall,
    accuracy,
    attention_with,
    baseline,
    pretrained,
    regained,
    swap_map,
    swapped,
    tuning_curve,
)

CLAIM = "Training with trigonometric features is unstable."
SOURCE = "Performer paper (arXiv 2009.14794), section 4.3 and figure 5 (right), on a task without data of its own"
AXES = Axes("steps of tuning after the swap", "share of right answers, or of normalisers below zero")

_SINES, _FAVOR, _NEGATIVE = "sines and cosines, r = ", "FAVOR+, r = ", "normalisers below zero, r = "


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment, those of the swap to FAVOR+."""

    task: Recall
    num_features: tuple[int, ...]
    steps: tuple[int, ...]
    draws: int


QUICK = Config(Recall(16, 8, 400), num_features=(32,), steps=(0, 15, 30, 60), draws=3, seconds=6)
FULL = Config(Recall(32, 16, 1000), num_features=(32, 128), steps=(0, 15, 30, 60, 100, 150), draws=3, seconds=70)


class _Run(NamedTuple):
    """One tuning under sines and cosines."""

    right: dict[int, Tensor]
    negative: dict[int, float]


def rows(config: Config) -> Iterator[Measurement]:
    """Accuracy of both maps and of the baselines, and how many normalisers of the sines' are negative."""
    for step in config.steps:
        for series in (EXACT, UNIFORM):
            yield Measurement(series, step, partial(_baseline, config, series, step))
        for width in config.num_features:
            yield Measurement(f"{_SINES}{width}", step, partial(_right, config, Trigonometric, width, step))
            yield Measurement(f"{_FAVOR}{width}", step, partial(_right, config, FavorPlus, width, step))
    for width in config.num_features:
        for step in (config.steps[0], config.steps[-1]):
            yield Measurement(f"{_NEGATIVE}{width}", step, partial(_negative, config, width, step))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Which part of the way to exact attention tuning covers, at the width where the sines do best."""
    exact = in_series(rows, EXACT)[0].value
    widths = sorted(int(name.removeprefix(_SINES)) for name in {row.series for row in rows} if name.startswith(_SINES))
    shares = {width: regained(in_series(rows, f"{_SINES}{width}"), exact) for width in widths}
    best = max(widths, key=lambda width: shares[width][0])
    (share, error), sines, favor = shares[best], *(in_series(rows, f"{name}{best}")[-1] for name in (_SINES, _FAVOR))
    first, last = (row.value for row in in_series(rows, f"{_NEGATIVE}{best}"))
    return decide(
        holds=share + STANDARD_ERRORS * error < 0.5,
        fails=share - STANDARD_ERRORS * error > 0.5,
        figure=f"after {sines.x:.0f} steps {best} sines and cosines answer {sines.value:.1%}, as many positive "
        f"features {favor.value:.1%}, exact attention {exact:.1%}; of the sines' normalisers {first:.0%} were negative "
        f"before and {last:.0%} are after",
        tolerance=f"unstable where tuning regains less than half of the drop, by {STANDARD_ERRORS:.0f} standard errors "
        f"over draws and test sequences (here {share:.0%} ± {error:.1%})",
    )


def _right(config: Config, kind: type[FavorPlus | Trigonometric], width: int, step: int) -> Figure:
    """Mean over draws of the share of right answers."""
    if kind is FavorPlus:
        runs = [swapped(config.task, kind, width, draw, config.steps) for draw in range(config.draws)]
    else:
        runs = [_run(config, width, draw).right for draw in range(config.draws)]
    return over_runs([run[step] for run in runs])


def _negative(config: Config, width: int, step: int) -> Figure:
    """Mean over draws of the share of negative normalisers."""
    return mean_figure(torch.tensor([_run(config, width, draw).negative[step] for draw in range(config.draws)]))


def _baseline(config: Config, series: str, step: int) -> Figure:
    """Accuracy under exact attention, or averaging, tuned for as long."""
    return over_runs([baseline(config.task, series, config.steps)[step]])


@lru_cache(maxsize=32)
def _run(config: Config, width: int, draw: int) -> _Run:
    """One tuning: accuracy after every number of steps, negative normalisers before and after."""
    network, sines = pretrained(config.task), swap_map(Trigonometric, width, draw)
    before = _negative_share(network, config.task, sines)
    right = tuning_curve(network, config.task, attention_with(sines), config.steps, draw)
    after = _negative_share(network, config.task, sines)
    return _Run(right, {config.steps[0]: before, config.steps[-1]: after})


def _negative_share(network: Network, task: Recall, feature_map: FeatureMap) -> float:
    """Share of φ(q)·Σ_j φ(k_j) below zero, over test sequences, layers and heads."""
    found: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention, its normalisers counted."""
        total = features(feature_map, key.double(), "key").sum(-2, keepdim=True)
        normaliser = (features(feature_map, query.double(), "query") * total).sum(-1)
        found.append((normaliser < 0).double().mean())
        return linear_attention(query, key, value, feature_map)

    accuracy(network, task, attend)
    return torch.stack(found).mean().item()
