"""`linattn audit --budget` as the terminal shows it: what a language model loses by a constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from linattn.cli.terminal import ending, interrupts, print_table
from linattn.hf import load_language_model
from linattn.kv_cache.layer_plans import MemoryPlan, read_memory_plans, write_memory_plans
from linattn.processes import Processes
from linattn.records.texts import Text, read_text
from linattn_lab.asides import asides, set_aside
from linattn_lab.commands._terminal import whole_numbers
from linattn_lab.commands.stages import Stages, stages, until_pressed
from linattn_lab.constant_memory.measuring import MemoryAudit
from linattn_lab.constant_memory.records import MEMORY, MemoryRow, key_of
from linattn_lab.pace import Pace
from linattn_lab.report import MemorySummary, conclusions, lost, summarise_memory, table_at, write_report

_TOKENS = 4096


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line.

    Attributes:
        model: name, folder or file.
        text: a file, or None for the built-in text.
        budget: in exact keys, as it was written.
        tokens: of a passage; None for 4,096.
        passages: how many.
        contenders: names; None for all.
        out: folder of the files.
        again: whether to measure anew what was measured.
        plan_out: file of plans to be made and measured; None for none.
        calibration: the text to plan on; None for the second half of the text.
    """

    model: str | None
    text: Path | None
    budget: str
    tokens: int | None
    passages: int
    contenders: list[str] | None
    out: Path
    again: bool
    plan_out: Path | None
    calibration: Path | None


def audit_memory(asked: Asked, others: Mapping[str, object], console: Console, *, is_first: bool = True) -> None:
    """Measure, write memory.jsonl and the page, and print what was found."""
    records = asked.out / "memory.jsonl"
    left = partial(_what_is_left, records, asked.out) if is_first else str
    with ending("audit", console, left), interrupts() as pressed:
        senseless = [name for name, given in others.items() if given is not None]
        if senseless:
            raise ValueError(f"{', '.join(senseless)} and --budget are of two audits; leave one out")
        with stages(console) as watch:
            measured = _begun(asked, watch)
            if asked.plan_out is not None:
                _plan(measured, asked, asked.plan_out, watch, is_first=is_first)
            kept = Processes.of_this_run().from_first(
                [] if asked.again or not is_first else _earlier(measured, records, watch)
            )
            watch.pace = Pace(len(measured.wanted()), done=len(kept))
            rows = until_pressed(measured.rows(kept, watch), pressed)
            if not is_first:
                deque(rows, maxlen=0)
                return
            MEMORY.extend(records, measured.header, kept, rows)
        summary = summarise_memory(records)
        page = write_report(asked.out)
    _print(console, summary)
    console.print(f"Written: {escape(str(records))} and {escape(str(page))}", highlight=False)


def _begun(asked: Asked, watch: Stages) -> MemoryAudit:
    """The audit, with its model and its text."""
    if asked.model is None:
        raise ValueError("--budget is for causal language models; name one, as in linattn audit gemma-3-270m")
    budgets = whole_numbers(asked.budget, "--budget", "256,512,1024")
    if budgets[0] < 1:
        raise ValueError(f"budget must be 1 key or more, got {budgets[0]}")
    if asked.calibration is not None and asked.plan_out is None:
        raise ValueError("--calibration belongs to a plan; give --plan-out too, as in --plan-out plan.json")
    watch.begin(f"Loading {asked.model}")
    loaded, text = load_language_model(asked.model), read_text(asked.text)
    tokens = _TOKENS if asked.tokens is None else asked.tokens
    calibration = None if asked.plan_out is None else _calibration(asked)
    if calibration is not None and asked.calibration is None:
        text = Text(f"first half of {text.source}", text.content[: len(text.content) // 2])
    return MemoryAudit(
        loaded,
        text,
        budgets,
        num_tokens=tokens,
        num_passages=asked.passages,
        kinds=asked.contenders,
        calibration=calibration,
    )


def _calibration(asked: Asked) -> Text:
    """The text that plans are made on, of which nothing is measured."""
    if asked.calibration is not None:
        return read_text(asked.calibration)
    text = read_text(asked.text)
    return Text(f"second half of {text.source}", text.content[len(text.content) // 2 :])


def _plan(measured: MemoryAudit, asked: Asked, file: Path, watch: Stages, *, is_first: bool) -> None:
    """A plan at every budget, those of the file kept where they are of the same; the first process makes them."""
    plans: list[MemoryPlan] = []
    if is_first:
        text = _calibration(asked)
        try:
            found = {plan.budget: plan for plan in read_memory_plans(file)}
        except (OSError, ValueError):
            found = {}
        for budget in measured.header.budgets:
            plan = found.get(budget)
            if plan is None or asked.again or not measured.is_of(plan, text):
                plan = measured.plan(text, budget, watch)
            plans.append(plan)
            write_memory_plans(file, plans)
    for plan in Processes.of_this_run().from_first(plans):
        measured.take(plan)


def _earlier(measured: MemoryAudit, file: Path, watch: Stages) -> list[MemoryRow]:
    """Wanted rows that stand in the audit's file or in ones kept aside, where those differ in budgets and contenders.

    A file of an audit with others is kept aside.
    """
    order = measured.wanted()
    wanted, kept = set(order), dict[tuple[str, str, int], MemoryRow]()
    # A plan may be another one at the same budget.
    labels = {(entry.name, entry.budget): entry.label for entry in measured.entries}
    for path in (file, *asides(file)):
        header, rows = MEMORY.unfinished(path) or (None, [])
        if header is None or not header.measures_as(measured.header):
            continue
        for row in rows:
            if key_of(row) in wanted and labels[row.contender, row.budget] == row.label:
                kept.setdefault(key_of(row), row)
    found = MEMORY.unfinished(file)
    if file.exists() and (found is None or found[0] != measured.header):
        watch.begin(f"What was measured before is now in {set_aside(file)}: it is another audit's.")
    if kept:
        watch.begin(f"{len(kept):,} of {len(order):,} figures were measured before and are kept.")
    return [kept[key] for key in order if key in kept]


def _print(console: Console, summary: MemorySummary) -> None:
    """What is lost, then the figures budget by budget."""
    first = lost(summary)
    console.print(f"[bold]{escape(first.heading)}[/bold] {escape(first.text)}", highlight=False)
    for budget in summary.budgets:
        console.print(f"[bold]At the bytes of {budget:,} keys:[/bold]", highlight=False)
        print_table(console, table_at(summary, budget))
    for point in conclusions(summary):
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)


def _what_is_left(records: Path, out: Path) -> str:
    """What an interrupted run has kept; its page is written where there are figures."""
    try:
        summarise_memory(records)
        return (
            f"All figures so far are in {records}; the same command goes on from there. {write_report(out)} has them."
        )
    except (KeyboardInterrupt, OSError, ValueError):
        return f"Nothing was measured yet; {out} is changed by nothing but what was said above."
