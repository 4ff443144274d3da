"""The command `linattn audit` as the terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linattn.hf import LoadedModel, load
from linattn.lab.audit.measurements import Measurements, default_methods
from linattn.lab.audit.measuring import Audit, Planned
from linattn.lab.audit.planned import plan_model, second_half
from linattn.lab.audit.records import HeadRow, ModelRow, Row, write_records
from linattn.lab.audit.text import Text, read_text
from linattn.lab.commands.terminal import ending, interrupts, print_table, progress_bar, whole_numbers
from linattn.lab.report import AuditSummary, Point, advise, overview, summarise_audit, write_report
from linattn.planning import write_plans
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
    target: Annotated[
        float | None, typer.Option(help="Also plan a method for each head that meets this error, and measure the plan.")
    ] = None,
    plan_out: Annotated[
        Path | None, typer.Option(help="File of the plan; plan.json beside the page if left out. Needs --target.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="The text to plan on; the second half of the text if left out. Needs --target.")
    ] = None,
) -> None:
    """Measure how wrong linear attention is on a model: every layer, head and method, and the whole model.

    Everything is measured next to exact attention and to averaging the values uniformly.
    """
    console = Console()
    records, plans = out / "audit.jsonl", plan_out or out / "plan.json"
    with ending("audit", console, lambda: f"Nothing half-written is left in {out}."):
        if target is None and (plan_out or calibration):
            raise ValueError("--plan-out and --calibration belong to a plan; give --target too, as in --target 0.1")
        methods = tuple(parse_method(name) for name in maps) if maps else default_methods()
        wanted = Measurements(methods, whole_numbers(features, "--features", "64,256"), draws, seed)
        loaded, content = load(model), read_text(text)
        with console.status("Recording the model's attention"):
            planned = None if target is None else _planned(loaded, content, calibration, tokens, target)
            measured = Audit(loaded, content, wanted, num_tokens=tokens, planned=planned)
        header = measured.header
        if header.num_tokens < tokens:
            console.print(f"{escape(header.text)} gives only {header.num_tokens} tokens; all of them are read.")
        write_records(records, header, _shown(measured, console))
        if planned is not None:
            write_plans(plans, planned.plans)
        summary = summarise_audit(records)
        page = write_report(out)
    _print(console, summary)
    written = [records, page] if planned is None else [records, plans, page]
    console.print(f"Written: {escape(' and '.join(map(str, written)))}", highlight=False)


def _planned(loaded: LoadedModel, text: Text, calibration: Path | None, tokens: int, target: float) -> Planned:
    """Plans made on a text of which no token will be measured."""
    other = second_half(loaded, text, tokens) if calibration is None else read_text(calibration)
    return Planned(plan_model(loaded, other, target_error=target, num_tokens=tokens), target, other.source)


def _print(console: Console, summary: AuditSummary) -> None:
    """The report's words and its first table."""
    print_table(console, overview(summary, spreads=console.width >= _WIDE))
    advice = advise(summary)
    points = [*advice.targets, *advice.budgets, *advice.doubts]
    if summary.planned is not None:
        print_table(console, summary.planned.table())
        heading = f"A method for each head, for an error of {summary.planned.target}"
        points.insert(0, Point(heading, summary.planned.words()))
    for point in points:
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)


def _shown(measured: Audit, console: Console) -> Iterator[Row]:
    """The audit's rows, passed on under a progress bar: one step per configuration and baseline."""
    total = 2 + sum(1 for _ in measured.measurements.configurations()) + (measured.header.target is not None)
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
