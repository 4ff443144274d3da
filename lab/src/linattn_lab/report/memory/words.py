"""An audit of a constant memory in words and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from linattn.records.tables import Table
from linattn_lab.constant_memory.records import EXACT, PLANNED, UNIFORM
from linattn_lab.report._text import Point, number
from linattn_lab.report.memory.summary import SINKS, MemoryLine, MemorySummary

_OFF = "far part off"
_MERGED = "merged keys"


def lost(summary: MemorySummary) -> Point:
    """What a constant memory cannot do: recall per task at the smallest budget, beside the exact model's.

    Args:
        summary: of an audit.

    Returns:
        A remark for the first screen.
    """
    heading = "What does a constant memory lose?"
    exact, budgets = summary.line(EXACT), summary.budgets
    parts = []
    for task in summary.header.tasks if exact is not None and budgets else []:
        lines = [line for line in summary.lines if line.budget == budgets[0] and task in line.recall]
        if not lines or exact is None or task not in exact.recall:
            continue
        best = max(lines, key=lambda line: line.recall[task])
        plain = summary.line(SINKS, budgets[0])
        beside = "" if plain is None or task not in plain.recall else f", {SINKS} {plain.recall[task]:.0%}"
        parts.append(
            f"{task}: exact {exact.recall[task]:.0%}, best of all {best.recall[task]:.0%} ({best.contender}){beside}"
        )
    if not parts:
        return Point(heading, "Recall is not measured: the texts are too short, or the audit is not finished.")
    text = f"Recall of what was said before, at the bytes of {budgets[0]:,} keys: {'; '.join(parts)}."
    return Point(heading, text)


def conclusions(summary: MemorySummary) -> list[Point]:
    """Budget by budget: which contender is nearest to the exact model, and what both controls say of merged keys.

    Args:
        summary: of an audit.

    Returns:
        A remark per budget.
    """
    points = []
    for budget in summary.budgets:
        lines = summary.at(budget)
        if not lines:
            continue
        best, plain = lines[0], summary.line(SINKS, budget)
        text = f"Least KL {number(best.kl, 3)}: {best.contender} ({best.label})."
        if plain is not None and plain.passages and plain is not best:
            text += f" {SINKS} has {number(plain.kl, 3)}."
        text += _controls(summary, lines, budget)
        planned = summary.line(PLANNED, budget)
        if planned is not None and planned.passages:
            text += f" The plan ({planned.label}) has {number(planned.kl, 3)}."
        points.append(Point(f"At the bytes of {budget:,} keys", text))
    return points


def table_at(summary: MemorySummary, budget: int) -> Table:
    """All contenders at a budget, the least KL first, after both baselines.

    Args:
        summary: of an audit.
        budget: one of its own.

    Returns:
        A table.
    """
    baselines = [line for line in (summary.line(EXACT), summary.line(UNIFORM)) if line is not None]
    only_recall = [line for line in summary.lines if line.budget == budget and not line.passages]
    lines = [*baselines, *summary.at(budget), *only_recall]
    columns = ("contender", "sizes", "bytes", "KL", "perplexity", "same token", "error", *summary.header.tasks)
    return Table(columns, tuple(_row(summary, line) for line in lines), baselines=len(baselines))


def _row(summary: MemorySummary, line: MemoryLine) -> tuple[str, ...]:
    """One line's figures."""
    recall = (line.recall.get(task, math.nan) for task in summary.header.tasks)
    return (
        line.contender,
        line.label,
        f"{line.num_bytes:,}",
        number(line.kl, 3),
        number(line.perplexity),
        _share(line.same),
        number(line.error, 3),
        *(_share(score) for score in recall),
    )


def verdict(merged: float, plain: float, off: float) -> str:
    """Whether a far part is worth its bytes, given its KL, that of these bytes in exact keys, and that without it."""
    return "worth their bytes" if merged < min(plain, off) else "not worth their bytes"


def _controls(summary: MemorySummary, lines: Sequence[MemoryLine], budget: int) -> str:
    """Whether merged keys beat their bytes in exact keys, and nothing at all."""
    merged = next((line for line in lines if line.contender.startswith(_MERGED)), None)
    plain, off = summary.line(SINKS, budget), summary.line(_OFF, budget)
    if merged is None or plain is None or off is None or not (plain.passages and off.passages):
        return ""
    found = verdict(merged.kl, plain.kl, off.kl)
    return (
        f" Merged keys ({merged.label}) are {found}: KL {number(merged.kl, 3)}, with these bytes in exact keys "
        f"{number(plain.kl, 3)}, with the far part off {number(off.kl, 3)}."
    )


def _share(value: float) -> str:
    """Per cent; a dash for what is not measured."""
    return "–" if math.isnan(value) else f"{value:.0%}"
