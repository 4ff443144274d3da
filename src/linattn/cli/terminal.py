"""Terminal output of the commands: progress, tables, errors."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table as RichTable

from linattn.cli.option_words import in_options
from linattn.processes import Processes
from linattn.records.tables import Table

_FAILED, _INTERRUPTED = 1, 130
# How torch and Python say that a size is beyond the memory.
_NO_MEMORY = re.compile(r"Storage size calculation overflowed|can't allocate memory|out of memory|MemoryError")
# How torch says that another process does not answer, or has ended.
_NO_ANSWER = re.compile(r"Timed out waiting|Connection closed by peer|Connection reset by peer")


def console_of(processes: Processes) -> Console:
    """The terminal, for the first process; the others are silent."""
    return Console(quiet=not processes.is_first)


@contextmanager
def of_option(option: str) -> Iterator[None]:
    """Let errors inside the block begin with an option's name.

    Raises:
        ValueError: where the block does.

    Example:
        >>> with of_option("--budget"):
        ...     int("many")
        Traceback (most recent call last):
        ValueError: --budget: invalid literal for int() with base 10: 'many'
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


@contextmanager
def ending(command: str, console: Console, what_is_left: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt or an error inside the block into a message and an exit code: 130 or 1.

    Raises:
        typer.Exit: after an interrupt or an error.
    """
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"Interrupted. {what_is_left()}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError) as error:
        rank = Processes.of_this_run().rank
        who = f"{command}, process {rank}" if rank else command
        text = f"linattn {who}: {in_options(str(error), command)}{_remedy(error)}"
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_FAILED) from None


def _remedy(error: Exception) -> str:
    """The end of a message about an error of torch's."""
    if _NO_MEMORY.search(repr(error)):
        return "; there is no such memory, give smaller numbers"
    if _NO_ANSWER.search(str(error)):
        return "; another process has ended, or is stopped: run the same command again to resume"
    return ""


def share_bar(console: Console) -> Progress:
    """A bar over a share of time, with the time passed and left, which vanishes when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C raises as ever and is noted: Python swallows what is raised while an object is being destroyed.

    Where interrupts are ignored, as in a shell's background, they stay so.
    """
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield pressed
        return

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def print_table(console: Console, content: Table) -> None:
    """A table of texts; where the terminal is narrow, the first column is folded and the figures stay whole."""
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(content.columns[0], overflow="fold")
    for column in content.columns[1:]:
        first, _, last = column.rpartition(" ")
        table.add_column(f"{first}\n{last}".strip(), justify="right", no_wrap=True)
    for number, row in enumerate(content.rows, start=1):
        table.add_row(*map(escape, row), end_section=number == content.baselines)
    console.print(table)
