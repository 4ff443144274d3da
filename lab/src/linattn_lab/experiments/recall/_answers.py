"""From the right answers of trained networks to figures, and from figures to how far one is ahead of another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from linattn_lab.experiments.experiment import Figure, FigureRow
from linattn_lab.experiments.inputs import over_runs
from linattn_lab.experiments.recall._networks import Training, right_answers

GUESS = "guessing among the values shown"

# Where all runs answer alike: the share of a single answer among all of a test's.
_LEAST_NOISE = 1e-4


def accuracy(training: Training, method: str, pairs: int, asked: Tensor | None = None) -> Figure:
    """Share of right answers over runs and test sequences.

    Args:
        training: how the networks are trained.
        method: what attends.
        pairs: P.
        asked: (sequences, P) bool, which queries count; all if None. Sequences without one are left out.
    """
    return over_runs(_shares(training, method, pairs, asked))


def gain(training: Training, method: str, other: str, pairs: int, asked: Tensor | None = None) -> Figure:
    """By how much one method's share is above another's: run by run, since both begin with the same network."""
    return _difference(_shares(training, method, pairs, asked), _shares(training, other, pairs, asked))


def loss(training: Training, method: str) -> Figure:
    """How much of a method's share is lost from the fewest pairs to the most, run by run."""
    few, many = (_shares(training, method, pairs, None) for pairs in (training.pairs[0], training.pairs[-1]))
    return _difference(few, many)


def _difference(shares: Sequence[Tensor], others: Sequence[Tensor]) -> Figure:
    """The difference of each run's shares, sequence by sequence."""
    return over_runs([one - other for one, other in zip(shares, others, strict=True)])


def _shares(training: Training, method: str, pairs: int, asked: Tensor | None) -> list[Tensor]:
    """Of each run, the share of right answers in each sequence."""
    runs = [right_answers(training, method, run)[pairs].double() for run in range(training.runs)]
    if asked is None:
        return [right.mean(1) for right in runs]
    some = asked.any(1)
    return [(right * asked).sum(1)[some] / asked.sum(1)[some] for right in runs]


def guess(pairs: int) -> Figure:
    """What is right by guessing among the P values shown, the most that is to be had without their keys."""
    return Figure(1 / pairs)


def noise(*rows: FigureRow) -> float:
    """Standard error of a sum or difference of independent figures."""
    return max(math.hypot(*((row.standard_error or 0.0) for row in rows)), _LEAST_NOISE)


def lead(row: FigureRow, other: FigureRow) -> float:
    """By how many standard errors of their difference one figure is above another."""
    return (row.value - other.value) / noise(row, other)


def beginning(rows: Sequence[FigureRow], method: str) -> str:
    """The series of a method, whose name goes on with the bytes it keeps."""
    return next(row.series for row in rows if row.series.startswith(f"{method} ("))
