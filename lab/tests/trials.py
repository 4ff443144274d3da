"""Experiments made up for tests: what they measure is counted, and may be told to crash or to be interrupted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from linattn_lab.experiments import reproduction
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, Measurement, Verdict


@dataclass(frozen=True)
class Config:
    """Sizes."""

    sizes: tuple[int, ...]
    seconds: float = 1.0


@dataclass
class Trial:
    """An experiment whose figures are the squares of its sizes.

    Attributes:
        status: the verdict's.
        raises: what a size raises instead of being measured.
        taken: sizes measured so far.
    """

    status: str = "holds"
    raises: dict[int, BaseException] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    CLAIM: ClassVar[str] = "A square grows with its side <for certain>."
    SOURCE: ClassVar[str] = "Euclid, book II"
    AXES: ClassVar[Axes] = Axes("side", "area", log_x=True)
    QUICK: ClassVar[Config] = Config((1, 2, 3))
    FULL: ClassVar[Config] = Config((1, 2, 3, 4, 5))

    def rows(self, config):
        """One figure per size, and averaging beside."""
        for size in config.sizes:
            yield Measurement("area", size, partial(self._area, size))
        yield Measurement(UNIFORM, 1, lambda: Figure(7.0))

    def verdict(self, rows):
        """What the test wants."""
        largest = max(row.value for row in rows if row.series == "area")
        return Verdict(self.status, f"the largest area is {largest:g}", "none: areas are counted")

    def _area(self, size):
        """The square, with a bar."""
        if size in self.raises:
            raise self.raises[size]
        self.taken.append(size)
        return Figure(float(size**2), standard_error=0.5, expected=size**2 + 0.25)


class Slow(Trial):
    """A figure takes a while."""

    def _area(self, size):
        time.sleep(0.2)
        return super()._area(size)


def slow_trials() -> None:
    """From now on this process has two slow experiments in the place of the real ones."""
    reproduction.EXPERIMENTS = {"first": Slow(), "second": Slow(status="fails")}
