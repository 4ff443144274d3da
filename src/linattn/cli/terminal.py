"""Terminal output of the commands: progress, tables, errors."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from linattn.records.texts import Table

_INTERRUPTED = 130


@contextmanager
def of_option(option: str) -> Iterator[None]:
    """Let errors inside the block begin with an option's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


@contextmanager
def ending(console: Console, what_is_left: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt inside the block into a message and exit code 130."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"Interrupted. {what_is_left()}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None


def share_bar(console: Console) -> Progress:
    """A bar over a share of time, with the time passed, which vanishes when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def print_table(console: Console, content: Table) -> None:
    """A table of texts; where the terminal is narrow, the first column is folded and the figures stay whole."""
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(content.columns[0], overflow="fold")
    for column in content.columns[1:]:
        table.add_column("\n".join(column.rsplit(" ", 1)), justify="right", no_wrap=True)
    for number, row in enumerate(content.rows, start=1):
        table.add_row(*map(escape, row), end_section=number == content.baselines)
    console.print(table)
