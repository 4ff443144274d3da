"""How much of a training's time goes to looks at the validation loss and to the test: a tenth at most.

Letters: B batch, L bytes of context.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from linattn.training import Seconds
from linattn_lab.pretraining.config import TrainConfig

# Windows of a look and of the test hold no more bytes than these, and the test has four at least, for its spread.
_LOOK_BYTES, _TEST_BYTES, _FEWEST = 1 << 15, 1 << 18, 4
# A training pass, forward and backward, takes the time of so many forward passes.
_PASSES = 3
# Shares of the training's time: of a look, the time from one to the next; of the test, all.
_LOOK_SHARE, _TEST_SHARE = 1 / 13, 1 / 20


@dataclass(frozen=True)
class Looks:
    """How many windows a look reads."""

    num_windows: int  # windows of a look
    # of a window, where the budget is a time; None where it is a number of steps, which no clock changes
    seconds: float | None = None

    @classmethod
    def of(cls, config: TrainConfig, read_one: Callable[[], object]) -> Looks:
        """Looks that a budget has time for.

        Args:
            config: with the budget.
            read_one: reads a window as a look does; called twice where the budget is a time, and timed the second time.
        """
        budget, most = config.budget, _LOOK_BYTES // config.context
        if not isinstance(budget, Seconds):
            return cls(_between(int(_LOOK_SHARE * _PASSES * budget.steps_per_look * config.batch_size), 1, most))
        read_one()
        start = time.perf_counter()
        read_one()
        seconds = max(time.perf_counter() - start, 1e-6)
        return cls(_between(int(_LOOK_SHARE * budget.seconds_per_look / seconds), 1, most), seconds)

    def num_tested(self, config: TrainConfig, steps: int, spent: float) -> int:
        """Bytes of the test after so many steps in so many seconds."""
        time_for = _PASSES * steps * config.batch_size if self.seconds is None else spent / self.seconds
        return _between(int(_TEST_SHARE * time_for), _FEWEST, _TEST_BYTES // config.context) * config.context

    def num_bytes(self, config: TrainConfig) -> int:
        """Bytes of a look."""
        return self.num_windows * config.context


def _between(number: int, least: int, most: int) -> int:
    """The number, or the nearer bound; the least where there is nothing between."""
    return max(min(number, most), least)
