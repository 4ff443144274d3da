"""How far a long work is, and how long the rest of it will take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Watch:
    """An observer of a measurement's progress; this one shows nothing."""

    def begin(self, words: str) -> None:
        """A stage begins."""

    def pass_by(self, words: str) -> None:
        """A part of a stage begins; of interest where a stage takes long."""

    def advance(self, work: float) -> None:
        """So much work is done."""


SILENT = Watch()


class Pace:
    """The time a work takes, from the part of it that is done."""

    total: float  # all work, in any unit
    done: float  # what of it is done

    def __init__(
        self,
        total: float,
        *,
        done: float = 0.0,
        seconds_per_unit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            total: all work, in any unit.
            done: the part of it that an earlier run did, which took this one no time.
            seconds_per_unit: what to expect before anything is done; None for no expectation.
            clock: seconds since some moment.
        """
        self.total, self.done = total, done
        self._kept, self._expected, self._clock = done, seconds_per_unit, clock
        self._start = clock()

    def advance(self, work: float) -> None:
        """Count work as done."""
        self.done += work

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        """Seconds the rest will take at the pace so far; None while nothing is known of it."""
        now = self.done - self._kept
        speed = self.passed / now if now > 0 else self._expected
        return None if speed is None else max(self.total - self.done, 0.0) * speed

    @property
    def words(self) -> str:
        """The share done and both times, in words."""
        passed, left = self.passed, self.left
        share = self.done / self.total if self.total else 1.0
        rest = "time left not known yet" if left is None else f"about {_clocked(left)} left"
        return f"{share:.0%}, {_clocked(passed)} passed, {rest}"


def _clocked(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """An estimate of a time in words.

    Example:
        >>> duration(38.2), duration(60.0), duration(1500.0), duration(9000.0)
        ('about 40 seconds', 'about 1 minute', 'about 25 minutes', 'about 2.5 hours')
    """
    if seconds < 55:
        return f"about {max(10 * round(seconds / 10), 10)} seconds"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"about {minutes} minute{'' if minutes == 1 else 's'}"
    return f"about {seconds / 3600:.1f} hours"
