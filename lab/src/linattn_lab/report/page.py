"""The page of all that was measured: one file, whatever of audit, claims and benchmark there is in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.records.json_files import to_json, write_json
from linattn_lab.report._render import write_html
from linattn_lab.report._text import Point
from linattn_lab.report.answers import answers
from linattn_lab.report.audit import frontier, tables
from linattn_lab.report.audit.advice import advise
from linattn_lab.report.audit.explorer import explorer
from linattn_lab.report.audit.glance import glance_chart, glance_table
from linattn_lab.report.audit.paying import best_line
from linattn_lab.report.audit.summary import SMALL_GAIN, AuditSummary, summarise_audit
from linattn_lab.report.bench.figures import memory_curves, time_curves
from linattn_lab.report.bench.summary import BenchSummary, conclude, length_table, summarise_bench
from linattn_lab.report.charts import Chart
from linattn_lab.report.claims.figures import alternative, claim_chart
from linattn_lab.report.claims.summary import SOURCES, ClaimsSummary, summarise_claims
from linattn_lab.report.memory import words
from linattn_lab.report.memory.figures import kl_by_bytes
from linattn_lab.report.memory.summary import MemorySummary, summarise_memory
from linattn_lab.report.twin import VERSION, Twin

FIGURES = ("audit.jsonl", "memory.jsonl", "claims.jsonl", "bench.jsonl")
"""The files that a page is drawn from."""
TWIN = "report.json"
"""The file of a page's figures, beside it."""


@dataclass(frozen=True)
class Report:
    """What there is to show; None for what was not measured.

    Attributes:
        audit: the error of the maps on a model's heads.
        claims: what was said of linear attention, and what holds.
        bench: how fast it is.
        memory: what a language model loses by a bounded KV cache.
        unread: files that could not be read, with what is wrong with them.
    """

    audit: AuditSummary | None = None
    claims: ClaimsSummary | None = None
    bench: BenchSummary | None = None
    memory: MemorySummary | None = None
    unread: tuple[Point, ...] = ()


@dataclass(frozen=True, eq=False)
class Section:
    """What one file adds to the page."""

    figures: Mapping[str, Chart]  # charts by the id of their place
    values: Mapping[str, object]  # what its template names


def write_report(folder: Path) -> Path:
    """Write index.html from audit.jsonl, memory.jsonl, claims.jsonl and bench.jsonl of a folder: those that are there.

    Beside it report.json has its figures, by the schema that `report_schema` gives.

    Args:
        folder: of the files. One that is damaged or of another version is named on the page, the others are shown.

    Returns:
        The page's path.

    Raises:
        OSError: if a file cannot be written.
    """
    unread: list[Point] = []
    found = {name: _read(folder / f"{name}.jsonl", *how, unread) for name, how in _SECTIONS.items()}
    read = {name: one for name, one in found.items() if one is not None}
    report = Report(**{name: summary for name, (summary, _) in read.items()}, unread=tuple(unread))
    page = folder / "index.html"
    _write(report, [section for _, section in read.values()], page)
    write_json(folder / TWIN, to_json(_twin(report), finite=False))
    return page


def write_page(report: Report, path: Path) -> None:
    """Write a report as one file, scripts and styles inside it; the page forbids itself every network access.

    Args:
        report: what there is to show.
        path: the file; replaced in one step.

    Raises:
        OSError: if the file cannot be written.
    """
    summaries = {name: getattr(report, name) for name in _SECTIONS}
    _write(report, [_SECTIONS[name][1](summary) for name, summary in summaries.items() if summary is not None], path)


def _write(report: Report, sections: Sequence[Section], path: Path) -> None:
    """The page of sections that are drawn."""
    figures: dict[str, Chart] = {}
    values: dict[str, object] = {"report": report, "answers": _answers(report)}
    for section in sections:
        figures |= section.figures
        values |= section.values
    write_html(path, "report.html.j2", figures, values)


def _answers(report: Report) -> tuple[Point, ...]:
    """What a reader asks first; what a bounded KV cache loses comes before all else."""
    first = () if report.memory is None else (words.lost(report.memory),)
    return (*first, *answers(report.audit, report.claims, report.bench))


def _twin(report: Report) -> Twin:
    """A report's figures."""
    sections = {name: getattr(report, name) for name in _SECTIONS}
    return Twin("linattn report", VERSION, _answers(report), **sections, unread=report.unread)


def _draw_claims(summary: ClaimsSummary) -> Section:
    """The claims' charts, and what their section names."""
    figures = {f"chart-{claim.name}": claim_chart(claim) for claim in summary.claims}
    return Section(figures, {"alternative": alternative, "sources": SOURCES})


def _draw_audit(summary: AuditSummary) -> Section:
    """The audit's charts, and what its section names."""
    chosen = best_line(summary.lines) or summary.lines[0]
    figures = {
        "audit-glance": glance_chart(summary),
        "state-frontier": frontier.state_frontier(summary),
        "flops-frontier": frontier.flops_frontier(summary),
    }
    values = {
        "glance": glance_table(summary),
        "advice": advise(summary),
        "end_to_end": tables.end_to_end(summary),
        "heads": tables.heads(summary),
        "chosen": chosen.words,
        "cells": tables.head_cells(summary),
        "small_gain": SMALL_GAIN,
        "explorer": to_json(explorer(summary)),
    }
    return Section(figures, values)


def _draw_bench(summary: BenchSummary) -> Section:
    """The benchmark's charts, and what its section names."""
    figures = {"time-curves": time_curves(summary)}
    measured = any(row.linear_memory is not None for row in summary.rows)
    if measured:
        figures["memory-curves"] = memory_curves(summary)
    values = {"points": conclude(summary), "table_of_lengths": length_table(summary), "memory_measured": measured}
    return Section(figures, values)


def _draw_memory(summary: MemorySummary) -> Section:
    """The chart of an audit of a bounded KV cache, and what its section names."""
    length, budget = summary.hardest
    values = {
        "memory_glance": words.glance(summary, length, budget),
        "memory_setting": words.setting_words(summary),
        "memory_tables": {
            (*setting, words.place_words(*setting)): words.table_at(summary, *setting) for setting in summary.settings
        },
        "memory_hardest": words.place_words(length, budget),
    }
    return Section({"kl-by-bytes": kl_by_bytes(summary, length)}, values)


def _read(
    path: Path, summarise: Callable[[Path], Any], draw: Callable[[Any], Section], unread: list[Point]
) -> tuple[Any, Section] | None:
    """A file's summary and its section of the page; what is wrong with it goes to `unread`."""
    if not path.exists():
        return None
    heading = f"{path.name} could not be read"
    try:
        summary = summarise(path)
        _answers(Report(**{path.stem: summary}))
        return summary, draw(summary)
    except (ValueError, OSError) as error:
        unread.append(Point(heading, str(error)))
    except Exception as error:
        # Figures may contradict each other in more ways than can be listed, and must not cost the other files theirs.
        what = f"its figures contradict each other ({type(error).__name__}: {error})"
        unread.append(Point(heading, f"{path} is damaged: {what}; move it away and measure again"))
    return None


_SECTIONS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Section]]] = {
    "audit": (summarise_audit, _draw_audit),
    "memory": (summarise_memory, _draw_memory),
    "claims": (summarise_claims, _draw_claims),
    "bench": (summarise_bench, _draw_bench),
}
"""How each file is read, and drawn, by its name and the report's field."""
