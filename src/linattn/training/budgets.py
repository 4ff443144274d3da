"""How far a training has come, and how far it is to go: by the clock or by steps."""

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


_LOOKS, _MOST_SECONDS = 20, 60.0
# Looks take a tenth of the time at most, but for the first and the last.
_STEPS_PER_LOOK = 12
# Where a look reads as much as a step, which takes three times as long.
_FEWEST_STEPS = 4


@dataclass(frozen=True)
class Seconds:
    """A time: twenty looks, more where a minute passes between two, fewer where they would take over a tenth of it.

    Attributes:
        total: seconds of steps, looks and checkpoints together.

    Example:
        >>> Seconds(100.0).share(Progress(3, 25.0, 1.0, 1.0, 1.0))
        0.25
        >>> looked = Progress(3, 25.0, 1.0, 1.0, 1.0)
        >>> [Seconds(100.0).is_look_due(Progress(4, 31.0, 1.0, 1.0, 1.0), looked, took=took) for took in (0.5, 1.0)]
        [True, False]
    """

    total: float

    def share(self, progress: Progress) -> float:
        """How much of it is spent, 1 for all."""
        return progress.seconds / self.total if self.total else 1.0

    @property
    def seconds_per_look(self) -> float:
        """From one look to the next, where looks take little."""
        return min(self.total / _LOOKS, _MOST_SECONDS)

    def is_look_due(self, progress: Progress, looked: Progress, *, took: float) -> bool:
        """Whether it is time to look, the last look having ended at `looked` and taken so many seconds."""
        between = max(self.seconds_per_look, _STEPS_PER_LOOK * took)
        return progress.seconds - looked.seconds >= between or progress.seconds >= self.total


@dataclass(frozen=True)
class Steps:
    """A number of steps, and twenty looks at steps of their own, fewer where a step in four would have one.

    Nothing depends on how fast the machine is.

    Attributes:
        total: of steps.

    Example:
        >>> begun = Progress(0, 0.0, 1.0, 1.0, 1.0)
        >>> steps = (Progress(step, 0.0, 1.0, 1.0, 1.0) for step in range(1, 66))
        >>> [one.step for one in steps if Steps(65).is_look_due(one, begun, took=0.0)][-3:]
        [60, 64, 65]
    """

    total: int

    def share(self, progress: Progress) -> float:
        """How much of it is spent, 1 for all."""
        return progress.step / self.total if self.total else 1.0

    def is_look_due(self, progress: Progress, looked: Progress, *, took: float) -> bool:
        """Whether it is time to look; when the last look was, and how long it took, is no matter."""
        return progress.step % self.steps_per_look == 0 or progress.step >= self.total

    @property
    def steps_per_look(self) -> int:
        """From one look to the next."""
        return max(_FEWEST_STEPS, self.total // _LOOKS)


Budget = Seconds | Steps
