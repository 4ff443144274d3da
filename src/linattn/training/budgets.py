"""How long a training goes on, and when it looks at its validation loss."""

from __future__ import annotations

from dataclasses import dataclass

from linattn.training.progress import Progress

_LOOKS, _MOST_SECONDS = 20, 60.0


@dataclass(frozen=True)
class Seconds:
    """A time: twenty looks, and more where a minute passes between two.

    Attributes:
        total: seconds of steps, looks and checkpoints together.

    Example:
        >>> Seconds(100.0).share(Progress(3, 25.0, 1.0, 1.0, 1.0))
        0.25
    """

    total: float

    def share(self, progress: Progress) -> float:
        """How much of it is spent, 1 for all."""
        return progress.seconds / self.total if self.total else 1.0

    def is_look_due(self, progress: Progress, looked: Progress) -> bool:
        """Whether it is time to look, the last look having been at `looked`."""
        since = progress.seconds - looked.seconds
        return since >= min(self.total / _LOOKS, _MOST_SECONDS) or progress.seconds >= self.total


@dataclass(frozen=True)
class Steps:
    """A number of steps, and twenty looks at steps of their own: nothing depends on how fast the machine is.

    Attributes:
        total: of steps.

    Example:
        >>> begun = Progress(0, 0.0, 1.0, 1.0, 1.0)
        >>> [step for step in range(1, 66) if Steps(65).is_look_due(Progress(step, 0.0, 1.0, 1.0, 1.0), begun)][-3:]
        [60, 63, 65]
    """

    total: int

    def share(self, progress: Progress) -> float:
        """How much of it is spent, 1 for all."""
        return progress.step / self.total if self.total else 1.0

    def is_look_due(self, progress: Progress, looked: Progress) -> bool:
        """Whether it is time to look; when the last look was is no matter."""
        return progress.step % max(1, self.total // _LOOKS) == 0 or progress.step >= self.total


Budget = Seconds | Steps
