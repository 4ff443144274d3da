"""How a command shows a training: a bar on a terminal, a line for every part of it elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from linattn.lab.commands.terminal import interrupts, share_bar
from linattn.training import Notify, Progress

# Without a terminal the time left is printed from this share of a training on, then once in every such part of it.
_FIRST_SHARE, _PARTS = 0.01, 4


@contextmanager
def training_progress(
    console: Console, before: str, words: Callable[[Progress], str], *, parts: int = _PARTS
) -> Iterator[Notify]:
    """What a training is to call after each step; an interrupt that was swallowed is raised there.

    Args:
        console: where it is shown.
        before: what is done until the first step.
        words: how far a training has come, in words.
        parts: how many lines of it are printed where there is no terminal.
    """
    with _shown(console, before, words) if console.is_terminal else _told(console, before, words, parts) as notify:
        yield notify


@contextmanager
def _shown(console: Console, before: str, words: Callable[[Progress], str]) -> Iterator[Notify]:
    """A bar, and the function that moves it."""
    with interrupts() as pressed, share_bar(console) as bar:
        task = bar.add_task(escape(before), total=None)

        def notify(name: str, share: float, progress: Progress) -> None:
            """Move the bar."""
            bar.update(task, description=escape(f"{name}, {words(progress)}"), total=1.0, completed=share)
            if share == 1.0:
                bar.update(task, description="Measuring", total=None)
            if pressed:
                raise KeyboardInterrupt

        yield notify


@contextmanager
def _told(console: Console, before: str, words: Callable[[Progress], str], parts: int) -> Iterator[Notify]:
    """A line when a training has begun, at every part of it, and at its end."""
    console.print(before, markup=False)
    begun: dict[str, tuple[float, float]] = {}
    due: dict[str, float] = {}

    def tell(name: str, share: float, progress: Progress) -> None:
        """Print a line where one is due."""
        now = time.perf_counter()
        start, first = begun.setdefault(name, (now, share))
        if share >= 1.0:
            console.print(f"{name}: done, {words(progress)}; measuring", markup=False, highlight=False)
        elif share - first >= _FIRST_SHARE and share >= due.get(name, 0.0):
            # What a run before this one did was not done at this one's speed.
            left = (now - start) / (share - first) * (1.0 - share)
            line = f"{name}: {share:.0%} done, {words(progress)}, about {left / 60:.1f} minutes left"
            console.print(line, markup=False, highlight=False)
            due[name] = (math.floor(share * parts) + 1) / parts

    with interrupts() as pressed:

        def notify(name: str, share: float, progress: Progress) -> None:
            """Print, and raise an interrupt that was noted."""
            tell(name, share, progress)
            if pressed:
                raise KeyboardInterrupt

        yield notify
