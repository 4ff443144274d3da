"""What the laboratory's commands read and show beside those of the library: lists of numbers, tables of sentences."""

from __future__ import annotations

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from linattn.cli.app import MOST
from linattn.records.texts import Table


def whole_numbers(text: str, option: str, example: str) -> tuple[int, ...]:
    """Different positive whole numbers separated by commas, in ascending order.

    Example:
        >>> whole_numbers("256,64", "--features", "64,256")
        (64, 256)
    """
    try:
        numbers = tuple(sorted(map(int, text.split(","))))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1 or numbers[-1] > MOST or len(set(numbers)) < len(numbers):
        words = f"wanted different positive whole numbers separated by commas, as in {example}; got {text!r}"
        raise typer.BadParameter(words, param_hint=option)
    return numbers


def to_resume(*, again: bool) -> str:
    """How an interrupted command is resumed: with --again it would begin anew."""
    return f"run the same command again{' without --again' if again else ''} to resume"


def print_words(console: Console, content: Table) -> None:
    """A table of sentences, every column folded to the terminal's width, the first one whole."""
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 1, 0))
    for number, column in enumerate(content.columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in content.rows:
        table.add_row(*map(escape, row))
    console.print(table)
