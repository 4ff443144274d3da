"""How far a training has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a training has come.

    Attributes:
        step: steps done.
        seconds: time spent on them, all runs together.
        first: validation loss before the first step.
        best: least validation loss so far.
        loss: validation loss at the last look.
        training_loss: loss of the last step; None before the first.
    """

    step: int
    seconds: float
    first: float
    best: float
    loss: float
    training_loss: float | None = None
