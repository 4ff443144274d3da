"""Cases by number: which kind each is, and how it ends."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from fuzzing.case import Case
from fuzzing.kinds import (
    attention,
    combination,
    compiled,
    damaged,
    gradients,
    mapped,
    masks,
    ranks,
    rows,
    states,
    streams,
    threads,
)
from fuzzing.limits import RefusedError
from fuzzing.task import Task, run_task


def _plain(draw: Callable[..., Task]) -> Callable[[Case], None]:
    """Draw a task and hold its results against the truth."""
    return lambda case: run_task(case, draw(case.dice))


KINDS = {
    "attention": _plain(attention.draw),
    "streams": _plain(streams.draw),
    "states": _plain(states.draw),
    "combination": _plain(combination.draw),
    "rows": _plain(rows.draw),
    "gradients": gradients.run,
    "threads": threads.run,
    "mapped": mapped.run,
    "compiled": compiled.run,
    "damaged": damaged.run,
    "masks": masks.run,
    "ranks": ranks.run,
}
# So many of a thousand.
_SHARES = {
    "attention": 280.0,
    "streams": 160.0,
    "states": 100.0,
    "combination": 90.0,
    "rows": 60.0,
    "gradients": 120.0,
    "threads": 20.0,
    "mapped": 56.0,
    "compiled": 4.0,
    "damaged": 70.0,
    "masks": 30.0,
    "ranks": 10.0,
}


class End(NamedTuple):
    """How a case ended.

    Attributes:
        number: of the case.
        kind: of the case.
        calls: what it called.
        symptom: "" if it passed, else one line.
        trace: of the failure.
        refused: whether it ended with a documented refusal.
    """

    number: int
    kind: str
    calls: str
    symptom: str = ""
    trace: str = ""
    refused: bool = False


def run(number: int) -> End:
    """Run a case."""
    case = Case(number)
    kind = case.dice.weighted(_SHARES)
    torch.manual_seed(number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            KINDS[kind](case)
    except RefusedError:
        return End(number, kind, str(case), refused=True)
    except Exception as error:
        symptom = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return End(number, kind, str(case), symptom, traceback.format_exc())
    return End(number, kind, str(case))


def kind_of(number: int) -> str:
    """Which kind a case is."""
    return Case(number).dice.weighted(_SHARES)
