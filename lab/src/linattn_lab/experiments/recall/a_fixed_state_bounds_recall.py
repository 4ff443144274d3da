"""Recall from a state of fixed size, and from a cache of all keys and values, as there are more pairs to recall.

A state of R features is a sum over all pairs: what it gives back of one is mixed with the others, and the more so the
more there are. More features keep pairs apart. Networks, task and training are those of `_networks`: of a reduced size.

Letters: P pairs, R features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import EXACT, Axes, FigureRow, Measurement, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.recall._answers import GUESS, accuracy, beginning, gain, guess, loss, noise
from linattn_lab.experiments.recall._networks import (
    FULL_TRAINING,
    LARGE,
    LARGEST,
    PLAIN,
    QUICK_TRAINING,
    SMALL,
    TAYLOR,
    Training,
    named,
)

CLAIM = (
    "The more pairs there are, the less of them is recalled from a state of fixed size, where softmax attention, whose "
    "cache grows, loses little; more bytes of state recover some of it."
)
SOURCE = (
    "Arora et al. 2024 (Based, arXiv 2402.18668), the trade-off of recall and memory; the task is multi-query "
    "associative recall of Zoology (arXiv 2312.04927), at a reduced size"
)
AXES = Axes("pairs to recall", "share of right answers", log_x=True)

LOST, EXACT_LOST, MORE = (
    f"lost by {PLAIN} since the fewest pairs",
    f"lost by {EXACT} since the fewest pairs",
    "gained by 64 features over 16",
)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment."""

    training: Training
    methods: tuple[str, ...]
    seconds: float = 1.0


QUICK = Config(QUICK_TRAINING, (PLAIN, SMALL, LARGE, TAYLOR), seconds=33)
FULL = Config(FULL_TRAINING, (PLAIN, SMALL, LARGE, LARGEST, TAYLOR), seconds=260)


def rows(config: Config) -> Iterator[Measurement]:
    """Accuracy of every method at every number of pairs, and what guessing gives."""
    training = config.training
    largest = training.task(training.pairs[-1])
    series = {EXACT: EXACT} | {method: named(method, largest) for method in config.methods}
    for pairs in training.pairs:
        yield Measurement(GUESS, pairs, partial(guess, pairs))
        for method, name in series.items():
            yield Measurement(name, pairs, partial(accuracy, training, method, pairs))
    yield Measurement(LOST, pairs, partial(loss, training, PLAIN))
    yield Measurement(EXACT_LOST, pairs, partial(loss, training, EXACT))
    yield Measurement(MORE, pairs, partial(gain, training, LARGE, SMALL, pairs))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Falls from the fewest pairs to the most, and what more features make of one map at the most."""
    few, *_, many = in_series(rows, beginning(rows, PLAIN))
    exact_few, *_, exact_many = in_series(rows, EXACT)
    small, large = (in_series(rows, beginning(rows, method))[-1] for method in (SMALL, LARGE))
    (lost,), (exact_lost,), (more,) = (in_series(rows, name) for name in (LOST, EXACT_LOST, MORE))
    falls = (lost.value / 2 - exact_lost.value) / noise(lost, exact_lost)
    recovers = more.value / noise(more)
    return decide(
        holds=min(falls, recovers) > STANDARD_ERRORS,
        fails=min(falls, recovers) < -STANDARD_ERRORS,
        figure=f"from {few.x:.0f} to {many.x:.0f} pairs {many.series} falls from {few.value:.1%} to {many.value:.1%}, "
        f"softmax attention from {exact_few.value:.1%} to {exact_many.value:.1%}; of {many.x:.0f} pairs {small.series} "
        f"recalls {small.value:.1%}, {large.series} {large.value:.1%}, guessing gives "
        f"{in_series(rows, GUESS)[-1].value:.1%}",
        tolerance=f"softmax attention loses less than half of what the state does, and more state recalls more, each "
        f"by {STANDARD_ERRORS:.0f} standard errors over runs and test sequences, run by run (here "
        f"{falls:.1f} and {recovers:.1f})",
    )
