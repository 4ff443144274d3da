"""The command `linattn audit` as the terminal shows it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from linattn.hf import load
from linattn.lab.audit import Audit
from linattn.lab.map_specs import parse_map
from linattn.lab.plan import Plan, default_maps
from linattn.lab.records import HeadRow, Row, write_records
from linattn.lab.report import Table, advise, overview, summarise, write_page
from linattn.lab.text import read_text

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

_INTERRUPTED = 130
# From this many columns on the table has room for the spreads.
_WIDE = 104


@app.callback()
def linattn() -> None:
    """Kernel attention in linear time that always says how wrong it is."""


@app.command()
def audit(
    model: Annotated[
        str | None,
        typer.Argument(help="A Hugging Face name or a folder; the packaged MiniLM sentence encoder if left out."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file in UTF-8; English prose that comes with Python if left out.")
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="NAME", help='A feature map, as in "Centred(Taylor(order=2))"; may be repeated.'),
    ] = None,
    features: Annotated[
        str, typer.Option(metavar="R,R,…", help="Feature counts, for maps whose width is free.")
    ] = "64,256",
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 512,
    draws: Annotated[int, typer.Option(help="Draws per random map.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for audit.jsonl and index.html.")] = Path("report"),
) -> None:
    """Measure how wrong linear attention is on a model: every layer, head and map, and the whole model.

    Everything is measured next to exact attention and to averaging the values uniformly.
    """
    console = Console()
    records, page = out / "audit.jsonl", out / "index.html"
    try:
        specs = tuple(parse_map(name) for name in maps) if maps else default_maps()
        plan = Plan(specs, _counts(features), draws, seed)
        with console.status("Recording the model's attention"):
            measured = Audit(load(model), read_text(text), plan, num_tokens=tokens)
        header = measured.header
        if header.num_tokens < tokens:
            console.print(f"{escape(header.text)} gives only {header.num_tokens} tokens; all of them are read.")
        write_records(records, header, _shown(measured, console))
        summary = summarise(records)
        write_page(summary, page)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Nothing half-written is left in {escape(str(out))}.")
        raise typer.Exit(_INTERRUPTED) from None
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        Console(stderr=True).print(f"linattn audit: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _print_table(console, overview(summary, spreads=console.width >= _WIDE))
    advice = advise(summary)
    for point in (*advice.budgets, *advice.doubts):
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)
    console.print(f"Written: {escape(str(records))} and {escape(str(page))}", highlight=False)


def _counts(text: str) -> tuple[int, ...]:
    """Feature counts, in ascending order."""
    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"--features wants whole numbers separated by commas, as in 64,256; got {text!r}") from None


def _shown(measured: Audit, console: Console) -> Iterator[Row]:
    """The audit's rows, passed on under a progress bar: one step per configuration and baseline."""
    total = 2 + sum(1 for _ in measured.plan.configurations())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _interrupts() as pressed, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=total)
        for row in measured.rows():
            if pressed:
                raise KeyboardInterrupt
            yield row
            if isinstance(row, HeadRow):
                progress.update(task, description=escape(f"{row.map}, layer {row.layer}"))
            else:
                progress.advance(task)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C raises as ever and is noted: Python swallows what is raised while an object is being destroyed."""
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _print_table(console: Console, content: Table) -> None:
    """A table of texts; where the terminal is narrow, the first column is folded and the figures stay whole."""
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(content.columns[0], overflow="fold")
    for column in content.columns[1:]:
        first, _, last = column.rpartition(" ")
        table.add_column(f"{first}\n{last}".strip(), justify="right", no_wrap=True)
    for number, row in enumerate(content.rows):
        table.add_row(*map(escape, row), end_section=number == 1)
    console.print(table)
