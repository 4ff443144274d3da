"""A long measurement as units that any process can do: dealt out in rounds, their rows in the order of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from linattn.processes import Processes
from linattn_lab.pace import Watch

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Unit(Generic[R]):
    """What is measured at once."""

    stage: str  # that it is a part of, in words; told where another one begins
    words: str  # for the unit itself; empty where the stage's say all
    work: float  # how much it is, in any unit
    measure: Callable[[], Any]  # does it, on one process
    # what comes of it as rows, on every process; by default what was measured are the rows
    take: Callable[[Any], Iterable[R]] = iter
    is_alone: bool = False  # whether no process may work meanwhile, for times
    is_done: bool = False  # whether an earlier run did it


def in_rounds(units: Iterable[Unit[R]], watch: Watch) -> Iterator[R]:
    """The rows of all units that are not done, in order, the same on every process of this run.

    In a round each process does a unit, then all exchange what they have: an early end costs a round at most.
    """
    processes, stage = Processes.of_this_run(), None
    for together in _rounds(units, processes.size):
        for unit in together:
            if unit.stage != stage:
                stage = unit.stage
                watch.begin(stage)
            if unit.words:
                watch.pass_by(unit.words)
        measured = processes.each(together, lambda unit: unit.measure())
        for unit, found in zip(together, measured, strict=True):
            yield from unit.take(found)
            watch.advance(unit.work)


def _rounds(units: Iterable[Unit[R]], size: int) -> Iterator[list[Unit[R]]]:
    """Units in lists of so many, those to be done alone by themselves."""
    together: list[Unit[R]] = []
    for unit in units:
        if unit.is_done:
            continue
        if together and (unit.is_alone or len(together) == size):
            yield together
            together = []
        if unit.is_alone:
            yield [unit]
        else:
            together.append(unit)
    if together:
        yield together
