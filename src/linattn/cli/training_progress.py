"""How a command shows a training and what is measured before and after: by a bar on a terminal, by lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import rich.progress
from rich.console import Console
from rich.markup import escape

from linattn.cli.terminal import share_bar
from linattn.processes import interrupts
from linattn.training import Notify, Progress

# Without a terminal the time left is printed from this share of a training on, then once in every such part of it.
_FIRST_SHARE, _PARTS = 0.01, 4
# And how far a measurement is, when nothing was printed for so many seconds.
_SILENCE = 20.0


class Shown(NamedTuple):
    """Two functions that show how far a work is."""

    notify: Notify  # for a training to call after each step
    measured: Callable[[str, float], None]  # for a measurement, with its name and the share of it that is done


@contextmanager
def training_progress(
    console: Console, before: str, words: Callable[[Progress], str], *, parts: int = _PARTS
) -> Iterator[Shown]:
    """Show a training: by a bar in a terminal, else by lines."""
    with interrupts() as pressed, share_bar(console) if console.is_terminal else nullcontext() as bar:
        shown = _told(console, before, words, parts) if bar is None else _shown(bar, before, words)

        def notify(name: str, share: float, progress: Progress) -> None:
            shown.notify(name, share, progress)
            if pressed:
                raise KeyboardInterrupt

        yield shown._replace(notify=notify)


def _shown(bar: rich.progress.Progress, before: str, words: Callable[[Progress], str]) -> Shown:
    """Show it by a bar."""
    task = bar.add_task(escape(before), total=None)

    def notify(name: str, share: float, progress: Progress) -> None:
        bar.update(task, description=escape(f"{name}, {words(progress)}"), total=1.0, completed=share)
        if share == 1.0:
            bar.update(task, description="Measuring", total=None)

    def measured(name: str, share: float) -> None:
        bar.update(task, description=escape(f"Measuring: {name}"), total=1.0, completed=share)

    return Shown(notify, measured)


def _told(console: Console, before: str, words: Callable[[Progress], str], parts: int) -> Shown:
    """Show it by lines: when a training has begun, at every part and the end; of measurements where they take long."""
    console.print(before, markup=False)
    begun: dict[str, tuple[float, float]] = {}
    due: dict[str, float] = {}
    last = time.perf_counter()

    def say(line: str) -> None:
        nonlocal last
        last = time.perf_counter()
        console.print(line, markup=False, highlight=False)

    def notify(name: str, share: float, progress: Progress) -> None:
        now = time.perf_counter()
        start, first = begun.setdefault(name, (now, share))
        if share >= 1.0:
            say(f"{name}: done, {words(progress)}; measuring")
        elif share - first >= _FIRST_SHARE and share >= due.get(name, 0.0):
            # What a run before this one did was not done at this one's speed.
            left = (now - start) / (share - first) * (1.0 - share)
            say(f"{name}: {share:.0%} done, {words(progress)}, about {left / 60:.1f} minutes left")
            due[name] = (math.floor(share * parts) + 1) / parts

    def measured(name: str, share: float) -> None:
        if time.perf_counter() - last >= _SILENCE:
            say(f"Measuring: {name}, {share:.0%} done")

    return Shown(notify, measured)
