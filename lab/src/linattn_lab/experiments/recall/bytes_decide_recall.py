"""Accuracy of recall against the bytes that a stream keeps after the context, measured, for every way to attend.

Bytes are those of all tensors in the streams of both layers after a real context: sums, exponents, keys and values kept
by softmax attention or by a window, the convolutions' tokens and the counts of tokens. Gates keep nothing. Networks,
task and training are those of `_networks`: of a reduced size.

Letters: P pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from linattn_lab.experiments.experiment import EXACT, Axes, FigureRow, Measurement, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide
from linattn_lab.experiments.recall._answers import GUESS, accuracy, guess, lead
from linattn_lab.experiments.recall._networks import (
    BESIDE,
    EXACT_GATED,
    FULL_TRAINING,
    HYBRID,
    LARGE,
    METHODS,
    PLAIN,
    QUICK_TRAINING,
    SMALL,
    TAYLOR,
    TRAINED,
    Training,
    measured_bytes,
)

CLAIM = "The bytes of the state decide what is recalled: of two ways to attend the one that keeps more recalls more."
SOURCE = (
    "Arora et al. 2024 (Based, arXiv 2402.18668), whose trade-off of recall and memory this takes for a law of bytes; "
    "the task is that of Zoology (arXiv 2312.04927), at a reduced size"
)
AXES = Axes("bytes of the state after the context", "share of right answers", log_x=True)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment: figures are those of the most pairs."""

    training: Training
    methods: tuple[str, ...]
    seconds: float = 1.0


QUICK = Config(
    QUICK_TRAINING,
    (
        EXACT,
        PLAIN,
        "FavorPlus, 64 features",
        SMALL,
        LARGE,
        TRAINED,
        TAYLOR,
        BESIDE,
        HYBRID,
    ),
    seconds=6,
)
FULL = Config(FULL_TRAINING, tuple(method for method in METHODS if method != EXACT_GATED), seconds=250)


def rows(config: Config) -> Iterator[Measurement]:
    """Every method at its bytes; sizes of one kind are a curve."""
    training, pairs = config.training, config.training.pairs[-1]
    found = {method: measured_bytes(method, training.task(pairs)) for method in config.methods}
    for method, size in found.items():
        yield Measurement(_kind(method), size, partial(accuracy, training, method, pairs))
    for size in (min(found.values()), max(found.values())):
        yield Measurement(GUESS, size, partial(guess, pairs))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Every two methods of different sizes: whether the larger recalls more, or whether one recalls less."""
    judged = [row for row in rows if row.series != GUESS]
    leads = {(more, less): lead(more, less) for more, less in permutations(judged, 2) if more.x > less.x}
    (more, less), least = min(leads.items(), key=lambda one: one[1])
    refuting = sum(one < -STANDARD_ERRORS for one in leads.values())
    return decide(
        holds=least > STANDARD_ERRORS,
        fails=least < -STANDARD_ERRORS,
        figure=f"{_words(less)}, {_words(more)}; of {len(leads)} pairs of different sizes the larger recalls less in "
        f"{refuting}; best of all, {_words(max(judged, key=lambda row: row.value))}; guessing gives "
        f"{next(row.value for row in rows if row.series == GUESS):.1%}",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors over runs and test sequences, of the pair of methods that "
        f"bears the claim out least (here {least:.1f})",
    )


def _kind(method: str) -> str:
    """A method without its number of features."""
    return re.sub(r", \d+ features", "", method)


def _words(row: FigureRow) -> str:
    """A figure in words."""
    return f"{row.series} recalls {row.value:.1%} with {row.x:,.0f} bytes"
