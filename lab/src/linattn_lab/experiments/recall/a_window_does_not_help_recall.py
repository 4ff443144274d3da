"""Exact attention to the latest tokens, beside a map and alone: what is recalled from within its reach, and beyond it.

A query sees its own block of w tokens and the one before; through two layers and their convolutions tokens of two
blocks more reach it. What was shown before that cannot enter a network with nothing but a window: there it guesses.
Beside a map, what is beyond the window is left to the map. Networks, task and training are those of `_networks`: of a
reduced size.

Letters: P pairs, w width of the window's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from linattn_lab.experiments.experiment import EXACT, Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, value_at
from linattn_lab.experiments.recall._answers import accuracy, beginning, gain, noise
from linattn_lab.experiments.recall._networks import (
    ALONE,
    BESIDE,
    FULL_TRAINING,
    KERNEL,
    QUICK_TRAINING,
    SMALL,
    WINDOW,
    Training,
    held_out,
    named,
)
from linattn_lab.experiments.recall._task import Sequences

CLAIM = "A window of exact attention beside a map does not help it to recall what lies beyond the window."
SOURCE = (
    "Arora et al. 2024 (Based, arXiv 2402.18668), on windows and recall; the task is that of Zoology (arXiv "
    "2312.04927), at a reduced size"
)
AXES = Axes("where the value was shown", "share of right answers", names=("within the window", "beyond its reach"))

CHANCE, GAINED, LACKED = "guessing among all values", "gained by the window", "lacked by the map alone"
_WITHIN, _BEYOND = range(len(AXES.names))


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment: figures are those of the most pairs."""

    training: Training
    methods: tuple[str, ...]
    seconds: float = 1.0


QUICK = Config(QUICK_TRAINING, (SMALL, BESIDE), seconds=4)
FULL = Config(FULL_TRAINING, (SMALL, BESIDE, ALONE), seconds=80)


def rows(config: Config) -> Iterator[Measurement]:
    """The map without a window and with one, softmax attention, and the window alone, near and far."""
    training, pairs = config.training, config.training.pairs[-1]
    task = training.task(pairs)
    asked = reached(held_out(task))
    series = {EXACT: EXACT} | {method: named(method, task) for method in config.methods}
    for where in (_WITHIN, _BEYOND):
        for method, name in series.items():
            yield Measurement(name, where, partial(accuracy, training, method, pairs, asked[where]))
        yield Measurement(GAINED, where, partial(gain, training, BESIDE, SMALL, pairs, asked[where]))
        yield Measurement(LACKED, where, partial(gain, training, EXACT, SMALL, pairs, asked[where]))
        yield Measurement(CHANCE, where, partial(Figure, 2 / training.vocab_size))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """What a window adds beyond its reach, in parts of what the map lacks there."""
    small, beside = (beginning(rows, method) for method in (SMALL, BESIDE))
    exact, far, far_beside = (value_at(rows, name, _BEYOND) for name in (EXACT, small, beside))
    near, near_beside = (value_at(rows, name, _WITHIN) for name in (small, beside))
    gained, lacked = (value_at(rows, name, _BEYOND) for name in (GAINED, LACKED))
    short, margin = lacked.value / 2 - gained.value, STANDARD_ERRORS * noise(gained, lacked)
    return decide(
        holds=short > margin,
        fails=short < -margin,
        figure=f"beyond its reach {far_beside.series} answers {far_beside.value:.1%}, {far.series} without it "
        f"{far.value:.1%}, softmax attention {exact.value:.1%}, chance "
        f"{value_at(rows, CHANCE, _BEYOND).value:.1%}; within it {near_beside.value:.1%} against {near.value:.1%}",
        tolerance="it helps if it adds more than half of what the map lacks of softmax attention, the middle between "
        f"nothing and all; {STANDARD_ERRORS:.0f} standard errors over runs and test sequences, run by run, decide "
        f"(here it adds {gained.value:.1%} ± {noise(gained):.1%} of {lacked.value:.1%})",
    )


def reached(shown: Sequences) -> tuple[Tensor, Tensor]:
    """Of each query, whether its value stands in the window, and whether no layer brings it there: (B, P) bool."""
    first = _first_seen(shown.places)
    # Of the first token seen, what its convolution and the layer below have seen.
    below = _first_seen((first - KERNEL + 1).clamp(min=0)) - KERNEL + 1
    return shown.shown >= first, shown.shown < below


def _first_seen(places: Tensor) -> Tensor:
    """The first token that a window shows to tokens at these places."""
    return ((places // WINDOW - 1) * WINDOW).clamp(min=0)
