"""The command `linattn audit` as the terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linattn.hf import load
from linattn.lab.audit import Audit
from linattn.lab.measurements import Measurements, default_methods
from linattn.lab.records import HeadRow, ModelRow, Row, write_records
from linattn.lab.report import advise, overview, summarise, write_page
from linattn.lab.terminal import ending, interrupts, print_table, progress_bar, whole_numbers
from linattn.lab.text import read_text
from linattn.planning.methods import parse_method

# From this many columns on the table has room for the spreads.
_WIDE = 104


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
        typer.Option(
            "--map", metavar="NAME", help='A method, as in "Expansion(num_centres=16) + window 16"; may be repeated.'
        ),
    ] = None,
    features: Annotated[
        str, typer.Option(metavar="R,R,…", help="Feature counts, for maps whose width is free.")
    ] = "64,256",
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 512,
    draws: Annotated[int, typer.Option(help="Draws per random map.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for audit.jsonl and index.html.")] = Path("report"),
) -> None:
    """Measure how wrong linear attention is on a model: every layer, head and method, and the whole model.

    Everything is measured next to exact attention and to averaging the values uniformly.
    """
    console = Console()
    records, page = out / "audit.jsonl", out / "index.html"
    with ending("audit", console, lambda: f"Nothing half-written is left in {out}."):
        methods = tuple(parse_method(name) for name in maps) if maps else default_methods()
        wanted = Measurements(methods, whole_numbers(features, "--features", "64,256"), draws, seed)
        with console.status("Recording the model's attention"):
            measured = Audit(load(model), read_text(text), wanted, num_tokens=tokens)
        header = measured.header
        if header.num_tokens < tokens:
            console.print(f"{escape(header.text)} gives only {header.num_tokens} tokens; all of them are read.")
        write_records(records, header, _shown(measured, console))
        summary = summarise(records)
        write_page(summary, page)
    print_table(console, overview(summary, spreads=console.width >= _WIDE))
    advice = advise(summary)
    for point in (*advice.targets, *advice.budgets, *advice.doubts):
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)
    console.print(f"Written: {escape(str(records))} and {escape(str(page))}", highlight=False)


def _shown(measured: Audit, console: Console) -> Iterator[Row]:
    """The audit's rows, passed on under a progress bar: one step per configuration and baseline."""
    total = 2 + sum(1 for _ in measured.measurements.configurations())
    with interrupts() as pressed, progress_bar(console) as progress:
        task = progress.add_task("Measuring", total=total)
        for row in measured.rows():
            if pressed:
                raise KeyboardInterrupt
            yield row
            if isinstance(row, HeadRow):
                progress.update(task, description=escape(f"{row.map}, layer {row.layer}"))
            elif isinstance(row, ModelRow):
                progress.advance(task)
