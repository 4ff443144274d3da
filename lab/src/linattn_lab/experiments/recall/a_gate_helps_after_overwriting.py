"""Recall of keys that were given a second value, by the same map with a forget gate and without one.

Half of the keys are shown again with another value, and the later value is right. A sum over all pairs weighs both
values alike, and so does softmax attention without positions: at best they guess between two. A gate lets the older
one fade, and the pairs shown once with it. It keeps nothing: the bytes of the state are the same. Networks, task and
training are those of `_networks`: of a reduced size; all of them begin with weights of softmax attention trained where
no key is overwritten.

Letters: P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from linattn_lab.experiments.experiment import EXACT, Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, value_at
from linattn_lab.experiments.recall._answers import accuracy, beginning, gain, noise
from linattn_lab.experiments.recall._networks import (
    EXACT_GATED,
    FULL_TRAINING,
    QUICK_TRAINING,
    TRAINED,
    TRAINED_GATED,
    Training,
    held_out,
    named,
)

CLAIM = "Where keys are given new values, a forget gate improves the recall of them, with as many bytes of state."
SOURCE = (
    "Peng et al. 2021 (RFA, arXiv 2103.02143), section 3.2, for the gate; the task is multi-query associative recall "
    "of Zoology (arXiv 2312.04927) with keys overwritten, at a reduced size"
)
AXES = Axes("which keys are asked for", "share of right answers", names=("overwritten", "shown once", "all"))

TWO, GAINED = "guessing between a key's two values", "gained by the gate"
_OVERWRITTEN, _ONCE, _ALL = range(len(AXES.names))


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment: figures are those of the most pairs."""

    training: Training
    seconds: float = 1.0


QUICK = Config(replace(QUICK_TRAINING, is_overwritten=True, tuning=100), seconds=13)
FULL = Config(replace(FULL_TRAINING, is_overwritten=True), seconds=100)


def rows(config: Config) -> Iterator[Measurement]:
    """Each attention with and without a gate, for each kind of key."""
    training, pairs = config.training, config.training.pairs[-1]
    task = training.task(pairs)
    overwritten = held_out(task).shown >= 2 * pairs
    asked = {_OVERWRITTEN: overwritten, _ONCE: ~overwritten, _ALL: None}
    series = {method: method for method in (EXACT, EXACT_GATED)}
    series |= {method: named(method, task) for method in (TRAINED, TRAINED_GATED)}
    yield Measurement(TWO, _OVERWRITTEN, partial(Figure, 0.5))
    for case, queries in asked.items():
        for method, name in series.items():
            yield Measurement(name, case, partial(accuracy, training, method, pairs, queries))
        yield Measurement(GAINED, case, partial(gain, training, TRAINED_GATED, TRAINED, pairs, queries))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The difference that the gate makes for overwritten keys."""
    plain, gated = (
        [value_at(rows, beginning(rows, method), case) for case in range(len(AXES.names))]
        for method in (TRAINED, TRAINED_GATED)
    )
    exact, exact_gated = (value_at(rows, method, _OVERWRITTEN) for method in (EXACT, EXACT_GATED))
    gained = value_at(rows, GAINED, _OVERWRITTEN)
    ahead = gained.value / noise(gained)
    return decide(
        holds=ahead > STANDARD_ERRORS,
        fails=ahead < -STANDARD_ERRORS,
        figure=f"of overwritten keys {plain[0].series} answers {plain[0].value:.1%}, with a gate {gated[0].value:.1%} "
        f"(softmax {exact.value:.1%}, with a gate {exact_gated.value:.1%}; either value: 50%); of keys shown once "
        f"{plain[_ONCE].value:.1%} and {gated[_ONCE].value:.1%}, of all {plain[_ALL].value:.1%} and "
        f"{gated[_ALL].value:.1%}",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors over runs and test sequences, run by run (here {ahead:.1f})",
    )
