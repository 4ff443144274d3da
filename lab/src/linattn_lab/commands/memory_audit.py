"""`linattn audit --budget` as the terminal shows it: what a language model loses by a bounded KV cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from linattn.cli.terminal import ending, print_table
from linattn.hf import LoadedModel, load_language_model
from linattn.kv_cache.layer_plans import MemoryPlan, read_memory_plans, write_memory_plans
from linattn.processes import Processes, interrupts
from linattn_lab.asides import asides, set_aside
from linattn_lab.commands._terminal import to_resume, whole_numbers
from linattn_lab.commands.stages import Stages, stages, until_pressed
from linattn_lab.kv_audit.measuring import MemoryAudit, check
from linattn_lab.kv_audit.names import FACTS
from linattn_lab.kv_audit.planning import is_of, plan_memory
from linattn_lab.kv_audit.records import MEMORY, MemoryRow, key_of
from linattn_lab.kv_audit.texts import KINDS, audit_texts, calibration_text
from linattn_lab.pace import Pace, duration
from linattn_lab.report import MemorySummary, write_report
from linattn_lab.report.memory.summary import summarise_memory
from linattn_lab.report.memory.words import glance, lost, place_words
from linattn_lab.texts import Text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    model: str | None  # name, folder or file
    text: Path | None  # a file, or None for the built-in texts
    text_kinds: list[str] | None  # of the built-in texts; None for all of them
    budget: str  # in exact keys, as it was written
    tokens: str | None  # of passages, as it was written; None for 4,096, or as many as the model takes
    dtype: str | None  # of the model; None for float32
    passages: int  # how many of each text
    kinds: list[str] | None  # names of methods, or written forms; None for all names
    tasks: list[str] | None  # names; None for facts alone
    samples: int  # texts of each task
    out: Path  # folder of the files
    again: bool  # whether to measure anew what was measured
    plan_out: Path | None  # file of plans to be made and measured; None for none
    calibration: Path | None  # the text to plan on; None for one that is not measured


def audit_memory(asked: Asked, others: Mapping[str, object], console: Console, *, is_first: bool = True) -> None:
    """Measure, write memory.jsonl and the page, and print the figures."""
    records = asked.out / "memory.jsonl"
    begun: list[object] = []  # the header of the file that is written
    left = partial(_what_is_left, begun, records, again=asked.again) if is_first else str
    with ending(console, left), interrupts() as pressed:
        if senseless := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{', '.join(senseless)} and --budget are of two audits; leave one out")
        with stages(console) as watch:
            loaded, measured = _begun(asked, watch)
            if asked.plan_out is not None:
                _plan(loaded, measured, asked, asked.plan_out, watch)
            earlier = _earlier(measured, records, watch, again=asked.again) if is_first else []
            earlier = Processes.of_this_run().from_first(earlier)
            _tell_the_cost(measured, earlier, watch)
            rows = until_pressed(measured.rows(earlier, watch), pressed)
            if not is_first:
                deque(rows, maxlen=0)
                return
            begun.append(measured.header)
            MEMORY.extend(records, measured.header, earlier, rows)
        summary = summarise_memory(records)
        page = write_report(asked.out)
    _print(console, summary)
    console.print(f"Written: {escape(str(records))} and {escape(str(page))}", highlight=False)


def _begun(asked: Asked, watch: Stages) -> tuple[LoadedModel, MemoryAudit]:
    """The model, and the audit of it."""
    if asked.model is None:
        raise ValueError("--budget is for causal language models; name one, as in linattn audit gemma-3-270m")
    budgets = whole_numbers(asked.budget, "--budget", "256,512,1024")
    lengths = None if asked.tokens is None else whole_numbers(asked.tokens, "--tokens", "4096,8192")
    if asked.calibration is not None and asked.plan_out is None:
        raise ValueError("--calibration belongs to a plan; give --plan-out too, as in --plan-out plan.json")
    if asked.text is not None and asked.text_kinds:
        raise ValueError("--text-kind is of the texts that come with Python; leave it or --text out")
    if asked.dtype is not None and asked.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {asked.dtype!r}")
    if asked.plan_out is not None and asked.plan_out.exists():
        read_memory_plans(asked.plan_out)  # A file of anything else is not written over.
    check(asked.tasks or [FACTS], asked.kinds or (), num_passages=asked.passages, num_samples=asked.samples)
    texts = audit_texts(asked.text, asked.text_kinds or KINDS)
    if asked.calibration is not None and any(_calibration(asked).content == text.content for text in texts.values()):
        raise ValueError("--calibration is a text that is measured; give another file, or leave it out")
    watch.begin(f"Loading {asked.model}")
    loaded = load_language_model(asked.model)
    nn.Module.to(loaded.model, DTYPES[asked.dtype or "float32"])
    if asked.plan_out is not None and asked.text is not None and asked.calibration is None:
        texts = {kind: _half(text, 0) for kind, text in texts.items()}
    audit = MemoryAudit(
        loaded,
        texts,
        budgets,
        lengths=lengths,
        num_passages=asked.passages,
        kinds=asked.kinds,
        tasks=asked.tasks or [FACTS],
        num_samples=asked.samples,
        calibration=None if asked.plan_out is None else _calibration(asked),
    )
    return loaded, audit


def _calibration(asked: Asked) -> Text:
    """The text that plans are made on, of which nothing is measured."""
    if asked.text is None or asked.calibration is not None:
        return calibration_text(asked.calibration)
    (text,) = audit_texts(asked.text).values()
    return _half(text, 1)


def _half(text: Text, number: int) -> Text:
    """The first or the second half of a text."""
    middle, name = len(text.content) // 2, ("first", "second")[number]
    return Text(f"{name} half of {text.source}", (text.content[:middle], text.content[middle:])[number])


def _plan(loaded: LoadedModel, measured: MemoryAudit, asked: Asked, file: Path, watch: Stages) -> None:
    """A plan at every budget beside others of the file, made by the first process where that has none of the same."""
    plans, processes = list[MemoryPlan](), Processes.of_this_run()

    def begin(words: str) -> None:
        """Say what begins, to the others too, which wait for no more than a few passes at a time."""
        watch.begin(words)
        processes.from_first(True)

    if processes.is_first:
        text, header = _calibration(asked), measured.header
        every = {plan.budget: plan for plan in read_memory_plans(file)} if file.exists() else {}
        made = [n for n in header.budgets if asked.again or n not in every or not is_of(every[n], header, text)]
        if every.keys() & made:
            watch.begin(f"The plans before are now in {set_aside(file)}.")
        for budget in made:
            every[budget] = plan_memory(loaded, text, budget, num_tokens=header.lengths[0], begin=begin)
            write_memory_plans(file, [every[n] for n in sorted(every)])
        plans = [every[budget] for budget in header.budgets]
        processes.from_first(False)
    else:
        while processes.from_first(False):
            pass
    for plan in processes.from_first(plans):
        measured.take(plan, file)


def _tell_the_cost(measured: MemoryAudit, earlier: Sequence[MemoryRow], watch: Stages) -> None:
    """Say what is left out, what is to come and how long it takes, from the time of a short text."""
    done = set(map(key_of, earlier))
    works = {key: measured.work(key) for key in measured.wanted()}
    left = sum(work for key, work in works.items() if key not in done)
    for name, reason in measured.header.left_out.items():
        watch.begin(f"Left out: {name}: {reason}.")
    watch.begin(f"{len(works) - len(done):,} figures to measure, {duration(left)} on this machine.")
    watch.pace = Pace(sum(works.values()), done=sum(works.values()) - left, seconds_per_unit=1.0)


def _earlier(measured: MemoryAudit, file: Path, watch: Stages, *, again: bool) -> list[MemoryRow]:
    """Wanted rows that stand in the audit's file or in ones kept aside, where those differ in what was asked for alone.

    A file of an audit with others is kept aside.
    """
    order = measured.wanted()
    wanted, kept_rows = set(order), dict[object, MemoryRow]()
    # A plan may be another one at the same budget.
    labels = {(method.name, method.budget): method.label for method in measured.methods}
    for path in () if again else (file, *asides(file)):
        header, rows = MEMORY.unfinished(path) or (None, [])
        if header is None or not header.measures_as(measured.header):
            continue
        for row in rows:
            if key_of(row) in wanted and labels[row.method, row.budget] == row.label:
                kept_rows.setdefault(key_of(row), row)
    former = MEMORY.unfinished(file)
    if file.exists() and (again or former is None or former[0] != measured.header):
        why = "it is another audit's" if former else "it cannot be read: damaged, or of another version"
        aside = set_aside(file, is_replaced=again)
        watch.begin(f"What was measured before is now in {aside}{'' if again else f': {why}'}.")
    if kept_rows:
        watch.begin(f"{len(kept_rows):,} of {len(order):,} figures were measured before and are kept.")
    return [kept_rows[key] for key in order if key in kept_rows]


def _print(console: Console, summary: MemorySummary) -> None:
    """The verdict, the figures that decide length by length and budget by budget, and how a text goes on."""
    verdict = lost(summary)
    console.print(f"[bold]{escape(verdict.heading)}[/bold] {escape(verdict.text)}", highlight=False)
    for length, budget in summary.settings:
        console.print(f"[bold]{place_words(length, budget)}:[/bold]", highlight=False)
        print_table(console, glance(summary, length, budget))
    for one in summary.continuations:
        end = escape(" ".join(one.ending.split()))
        console.print(f"[bold]Greedy continuation of {escape(one.text)}:[/bold] … {end}", highlight=False)
        for each in one.written:
            words = f"{escape(each.alike)} [italic]{escape(each.other)}[/italic]"
            console.print(f"[bold]{escape(each.method)}:[/bold] {words.strip()}", highlight=False)


def _what_is_left(begun: Sequence[object], records: Path, *, again: bool) -> str:
    """What an interrupted run has kept; its page is written where there are figures, and they are of this audit."""
    out = records.parent
    try:
        if summarise_memory(records).header not in begun:
            raise ValueError("these are another audit's")
        return f"Figures so far are in {records}; {to_resume(again=again)}. {write_report(out)} has them."
    except (KeyboardInterrupt, OSError, ValueError):
        return f"Nothing was measured yet; {out} is changed by nothing but what was said above."
