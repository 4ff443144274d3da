"""The command `linattn bench` as the terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linattn.cli.terminal import ending, interrupts, of_option, print_table
from linattn.methods.method import parse_method
from linattn_lab.bench.measuring import Bench
from linattn_lab.bench.records import BENCH, LengthRow, partial_path
from linattn_lab.bench.settings import Settings
from linattn_lab.commands._terminal import whole_numbers
from linattn_lab.commands.stages import stages
from linattn_lab.pace import Pace
from linattn_lab.report import conclude, length_table, summarise_bench, write_report

# From this many columns on the table has room for fastest and slowest.
_WIDE = 112


def bench(
    lengths: Annotated[str, typer.Option(metavar="L,L,…", help="Numbers of tokens.")] = "512,1024,2048,4096,8192,16384",
    map_: Annotated[
        str,
        typer.Option(
            "--map", metavar="NAME", help='A method, as in "FavorPlus + window 64" or "window 32 + merged 128".'
        ),
    ] = "FavorPlus",
    features: Annotated[
        int | None, typer.Option(help="Features of a map whose width is free; 256 if left out.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a query, key and value.")] = 64,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    causal: Annotated[bool, typer.Option("--causal", help="Hide later keys.")] = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="With the gradients of queries, keys and values.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Timed calls of each contender at each length.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the map's draw and of the inputs.")] = 0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each figure in a process of its own.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for bench.jsonl and index.html.")] = Path("report"),
) -> None:
    """Measure from which length on linear attention is faster than exact attention, on your shapes.

    Every result is verified before it is timed. An interrupted run goes on where it was when started again.
    """
    console = Console()
    records = out / "bench.jsonl"
    with ending("bench", console, lambda: _what_is_left(partial_path(records))):
        with of_option("--map"):
            parse_method(map_)
        settings = Settings(
            lengths=whole_numbers(lengths, "--lengths", "512,1024,2048"),
            map=map_,
            features=features,
            heads=heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
            is_causal=causal,
            backward=backward,
            repeats=repeats,
            seed=seed,
            device=device,
            memory=memory,
        )
        _measure(Bench(settings), records, console)
        summary = summarise_bench(records)
        page = write_report(out)
    print_table(console, length_table(summary, spreads=console.width >= _WIDE))
    for point in conclude(summary):
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)
    console.print(f"Written: {escape(str(records))} and {escape(str(page))}", highlight=False)


def _measure(measured: Bench, records: Path, console: Console) -> None:
    """Write the benchmark's file, going on from what an interrupted run of the same settings has left."""
    partial = partial_path(records)
    found = BENCH.unfinished(partial)
    kept = found[1] if found is not None and found[0] == measured.header else []
    if kept:
        lengths = ", ".join(f"{row.length:,}" for row in kept)
        console.print(f"Measured before the interrupt, and kept: {lengths} tokens.", highlight=False)
    elif partial.exists():
        console.print("An earlier run measured with other settings; starting again.", highlight=False)
    BENCH.extend(partial, measured.header, kept, _shown(measured, kept, console))
    partial.replace(records)


def _what_is_left(partial: Path) -> str:
    """What an interrupted run has kept."""
    found = BENCH.unfinished(partial)
    if found is None or not found[1]:
        return "No length was measured yet."
    header, rows = found
    return f"{len(rows)} of {len(header.lengths)} lengths are kept in {partial}; the same command goes on from there."


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
