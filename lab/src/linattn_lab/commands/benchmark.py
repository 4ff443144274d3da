"""The work of `linattn bench`, as the terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from linattn.cli.terminal import ending, print_table
from linattn.processes import interrupts
from linattn.records.files import locked
from linattn_lab.asides import set_aside
from linattn_lab.bench.measuring import Bench
from linattn_lab.bench.records import BENCH, LengthRow, partial_path
from linattn_lab.bench.settings import Settings
from linattn_lab.commands.stages import stages
from linattn_lab.pace import Pace
from linattn_lab.report import write_report
from linattn_lab.report.bench.summary import conclude, length_table, summarise_bench

_WIDE = 112  # From this many columns on the table has room for fastest and slowest.


def benchmark(settings: Settings, out: Path) -> None:
    """Write bench.jsonl and the page, and print the figures."""
    console, measured, records = Console(), Bench(settings), out / "bench.jsonl"
    partial = partial_path(records, measured.header)
    with ending(console, lambda: _what_is_left(partial)), locked(out):
        _measure(measured, records, partial, console)
        summary = summarise_bench(records)
        page = write_report(out)
    print_table(console, length_table(summary, spreads=console.width >= _WIDE))
    for point in conclude(summary):
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)
    console.print(f"Written: {escape(str(records))} and {escape(str(page))}", highlight=False)


def _measure(measured: Bench, records: Path, partial: Path, console: Console) -> None:
    """Write the benchmark's file, going on from what an interrupted run of the same settings has left."""
    found = BENCH.unfinished(partial)
    kept = found[1] if found is not None and found[0] == measured.header else []
    if kept:
        lengths = ", ".join(f"{row.length:,}" for row in kept)
        console.print(f"Measured before the interrupt, and kept: {lengths} tokens.", highlight=False)
    BENCH.extend(partial, measured.header, kept, _shown(measured, kept, console))
    former = BENCH.unfinished(records)
    if records.exists() and (former is None or former[0] != measured.header):
        words = f"What was measured before is now in {set_aside(records)}: it is of other settings."
        console.print(words, markup=False, highlight=False)
    partial.replace(records)


def _what_is_left(partial: Path) -> str:
    """What an interrupted run has kept."""
    found = BENCH.unfinished(partial)
    if found is None or not found[1]:
        return "No length was measured yet."
    of_all = f"{len(found[1])} of {len(found[0].lengths)}"
    return f"{of_all} lengths are kept in {partial}; run the same command again to resume."


def _shown(measured: Bench, kept: list[LengthRow], console: Console) -> Iterator[LengthRow]:
    """The benchmark's rows, passed on with a line for each stage of each length; work is counted in operations."""
    work = {length: measured.operations(length) for length in measured.header.lengths}
    with interrupts() as pressed, stages(console) as watch:
        watch.pace = Pace(sum(work.values()), done=sum(work[row.length] for row in kept))
        for row in measured.rows(kept, watch.begin):
            yield row
            watch.advance(work[row.length])
            if pressed:
                raise KeyboardInterrupt
