"""How a long command tells where it is: a line for every stage, terminal or not, and on a terminal a bar below."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from linattn_lab.pace import Pace, Watch

T = TypeVar("T")

# Within a stage a line is printed when none was for so many seconds.
_SILENCE = 20.0


class Stages(Watch):
    """Prints where a work is."""

    pace: Pace | None  # the work; None until it is known how much there is

    def __init__(
        self, console: Console, show: Callable[[str, Pace | None], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is printed yet."""
        self.pace = None
        self._console, self._show, self._clock = console, show, clock
        self._last = clock()

    def begin(self, words: str) -> None:
        """Print that a stage begins."""
        self._last = self._clock()
        known = "" if self.pace is None else f" ({self.pace.words})"
        self._console.print(f"{words}{known}", markup=False, highlight=False, soft_wrap=True)
        self._show(words, self.pace)

    def pass_by(self, words: str) -> None:
        """Print that part of a stage begins, if nothing was printed for long."""
        if self._clock() - self._last >= _SILENCE:
            self.begin(words)
        else:
            self._show(words, self.pace)

    def advance(self, work: float) -> None:
        """Count work as done."""
        if self.pace is not None:
            self.pace.advance(work)


@contextmanager
def stages(console: Console) -> Iterator[Stages]:
    """A `Stages` with a bar, which a terminal alone shows and which vanishes when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(words: str, pace: Pace | None) -> None:
            """Move the bar."""
            total, done = (None, 0.0) if pace is None else (pace.total, pace.done)
            progress.update(task, description=escape(words), total=total, completed=done)

        yield Stages(console, show)


def until_pressed(rows: Iterable[T], pressed: list[int]) -> Iterator[T]:
    """Rows, passed on until Ctrl-C was pressed, where Python may have swallowed what that raised."""
    for row in rows:
        if pressed:
            raise KeyboardInterrupt
        yield row
