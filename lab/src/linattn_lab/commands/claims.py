"""The work of `linattn reproduce`, as the terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from linattn.cli.terminal import ending
from linattn.processes import interrupts
from linattn.records.files import locked
from linattn.records.texts import Table
from linattn_lab.asides import set_aside
from linattn_lab.commands._terminal import print_words, to_resume
from linattn_lab.commands.stages import stages
from linattn_lab.experiments import EXPERIMENTS
from linattn_lab.experiments.experiment import FigureRow
from linattn_lab.experiments.records import CLAIMS, Record, Setting
from linattn_lab.experiments.reproduction import Reproduction
from linattn_lab.pace import Pace
from linattn_lab.report import write_report
from linattn_lab.report.claims.summary import summarise_claims, verdict_table


def list_claims() -> None:
    """Print every claim with its name and source."""
    rows = tuple((name, experiment.CLAIM, experiment.SOURCE) for name, experiment in EXPERIMENTS.items())
    print_words(Console(), Table(("name", "claim", "source"), rows))


def measure_claims(claims: Sequence[str], out: Path, *, setting: Setting, again: bool) -> None:
    """Write claims.jsonl and the page, and print the verdicts."""
    console = Console()
    file = out / "claims.jsonl"
    with ending(console, lambda: _what_is_left(file, out, again=again)), locked(out):
        run = Reproduction(claims, setting)
        kept = _kept(file, run, again, console)
        CLAIMS.extend(file, run.header, kept, _shown(run, kept, console))
        page = write_report(out)
        summary = summarise_claims(file)
    print_words(console, verdict_table(summary, run.names))
    console.print(f"Written: {escape(str(file))} and {escape(str(page))}", highlight=False)
    undecided = [claim.name for claim in summary.claims if claim.name in run.names and claim.status == "undecided"]
    if undecided:
        console.print(f"Could not decide: {', '.join(undecided)}. --full takes more samples.", highlight=False)
    for crash in run.crashes:
        Console(stderr=True).print(f"{crash.claim} crashed:\n{crash.trace}", markup=False, highlight=False)
    if undecided or run.crashes:
        raise typer.Exit(1)


def _kept(file: Path, run: Reproduction, again: bool, console: Console) -> list[Record]:
    """What an earlier run in the same circumstances has taken; a file of others is copied aside, not lost."""
    found = CLAIMS.unfinished(file)
    same = found is not None and found[0] == run.header
    kept = [record for record in found[1] if not (again and record.claim in run.names)] if found and same else []
    if file.exists() and (not same or again):
        aside = set_aside(file)
        why = "" if same else " It was measured at another setting, by another version or on another machine."
        console.print(f"What was measured before is now in {escape(str(aside))}.{why}", highlight=False)
    figures = sum(isinstance(record, FigureRow) and record.claim in run.names for record in kept)
    if figures:
        console.print(f"{figures:,} figures were measured before and are kept.", highlight=False)
    return kept


def _what_is_left(file: Path, out: Path, *, again: bool) -> str:
    """What an interrupted run has kept; its page is written, unless that is interrupted too."""
    kept = f"All figures so far are in {file}; {to_resume(again=again)}."
    try:
        return f"{kept} {write_report(out)} shows the claims that are decided."
    except (KeyboardInterrupt, OSError):
        return kept


def _shown(run: Reproduction, kept: list[Record], console: Console) -> Iterator[Record]:
    """The run's records, passed on with a line per claim; work is counted in the seconds its claims should take."""
    missing = run.missing(kept)
    work = {name: run.seconds(name) for name, number in missing.items() if number}
    with interrupts() as pressed, stages(console) as watch:
        watch.pace = Pace(sum(work.values()), seconds_per_unit=1.0)
        for record in run.records(kept, lambda name: watch.begin(f"Measuring {name}")):
            yield record
            if isinstance(record, FigureRow):
                watch.advance(work[record.claim] / missing[record.claim])
                watch.pass_by(f"Measuring {record.claim}")
            if pressed:
                raise KeyboardInterrupt
