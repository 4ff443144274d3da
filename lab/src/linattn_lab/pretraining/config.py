"""How a language model is trained."""

from __future__ import annotations

from dataclasses import dataclass

from linattn.softmax.checking import check_count, check_number, check_seed
from linattn.training import Budget, Seconds, Steps


@dataclass(frozen=True)
class TrainConfig:
    """How `pretrain` trains a language model.

    Attributes:
        context: L, bytes that the model reads at once.
        batch_size: windows of L bytes per step.
        minutes: wall-clock time of training with its looks at the validation loss; not used where `steps` is given.
        steps: how many steps, in place of a time: then the result depends on no clock.
        learning_rate: at its largest.
        redraw_every: how many steps a draw of random maps serves; None keeps the first.
        seed: of the windows' order, and of redraws.

    Raises:
        ValueError: a number is out of its range, not finite, or no whole one where it counts something.

    Example:
        >>> TrainConfig(context=0)
        Traceback (most recent call last):
        ...
        ValueError: context must be an integer of at least 1, got 0
    """

    context: int = 4096
    batch_size: int = 1
    minutes: float = 15.0
    steps: int | None = None
    learning_rate: float = 4e-3
    redraw_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_seed(self.seed)
        for name in ("minutes", "learning_rate"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("context", "batch_size", "steps", "redraw_every"):
            value = getattr(self, name)
            if value is not None or name in ("context", "batch_size"):
                check_count(name, value)

    @property
    def budget(self) -> Budget:
        """The steps, or else the time."""
        return Seconds(self.minutes * 60) if self.steps is None else Steps(self.steps)
