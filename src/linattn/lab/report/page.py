"""The page of all that was measured: one file, whatever of audit, claims and benchmark there is in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import plotly.graph_objects as go

from linattn.lab.report._render import write_html
from linattn.lab.report._text import Point
from linattn.lab.report.answers import answers
from linattn.lab.report.audit import frontier, head_map, tables
from linattn.lab.report.audit.advice import advise, best_line
from linattn.lab.report.audit.summary import SMALL_GAIN, AuditSummary, summarise_audit
from linattn.lab.report.bench.figures import memory_curves, time_curves
from linattn.lab.report.bench.summary import BenchSummary, conclude, length_table, summarise_bench
from linattn.lab.report.claims.figures import alternative, claim_chart
from linattn.lab.report.claims.summary import SOURCES, ClaimsSummary, summarise_claims

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What there is to show; None for what was not measured.

    Attributes:
        audit: how wrong the maps are on a model's heads.
        claims: what was said of linear attention, and what holds.
        bench: how fast it is.
        unread: files that could not be read, with what is wrong with them.
    """

    audit: AuditSummary | None = None
    claims: ClaimsSummary | None = None
    bench: BenchSummary | None = None
    unread: tuple[Point, ...] = ()


def write_report(folder: Path) -> Path:
    """Write index.html from audit.jsonl, claims.jsonl and bench.jsonl of a folder, those of them that are there.

    Cost: about 5 MB, nearly all of it plotly's script.

    Args:
        folder: of the files. One that is damaged or of another version is named on the page, the others are shown.

    Returns:
        The page's path.

    Raises:
        OSError: if the page cannot be written.

    Example:
        See `tests/lab/report/test_claims.py`.

    Source: none, a layout.
    """
    unread: list[Point] = []
    page = folder / "index.html"
    report = Report(
        audit=_read(folder / "audit.jsonl", summarise_audit, unread),
        claims=_read(folder / "claims.jsonl", summarise_claims, unread),
        bench=_read(folder / "bench.jsonl", summarise_bench, unread),
        unread=tuple(unread),
    )
    write_page(report, page)
    return page


def write_page(report: Report, path: Path) -> None:
    """Write a report as one file, scripts and styles inside it; the page forbids itself every network access.

    Cost: about 5 MB, nearly all of it plotly's script.

    Args:
        report: what there is to show.
        path: the file; replaced in one step.

    Raises:
        OSError: if the file cannot be written.

    Example:
        See `tests/lab/report/test_claims.py`.

    Source: none, a layout.
    """
    figures: dict[str, go.Figure] = {}
    values: dict[str, object] = {"report": report, "answers": answers(report.audit, report.claims, report.bench)}
    if report.claims is not None:
        for claim in report.claims.claims:
            figures[f"chart-{claim.name}"] = claim_chart(claim)
        values |= {"alternative": alternative, "sources": SOURCES}
    if report.audit is not None:
        values |= _audit_values(report.audit, figures)
    if report.bench is not None:
        values |= _bench_values(report.bench, figures)
    write_html(path, "report.html.j2", figures, values)


def _audit_values(summary: AuditSummary, figures: dict[str, go.Figure]) -> dict[str, object]:
    """The audit's charts, and what its section names."""
    chosen = best_line(summary.lines) or summary.lines[0]
    figures["head-map"] = head_map.head_map(summary, chosen)
    figures["state-frontier"] = frontier.state_frontier(summary)
    figures["flops-frontier"] = frontier.flops_frontier(summary)
    return {
        "advice": advise(summary),
        "end_to_end": tables.end_to_end(summary),
        "heads": tables.heads(summary),
        "chosen": f"{chosen.map} · {chosen.features:,}",
        "cells": head_map.head_cells(summary),
        "small_gain": SMALL_GAIN,
    }


def _bench_values(summary: BenchSummary, figures: dict[str, go.Figure]) -> dict[str, object]:
    """The benchmark's charts, and what its section names."""
    figures["time-curves"] = time_curves(summary)
    measured = any(row.linear_memory is not None for row in summary.rows)
    if measured:
        figures["memory-curves"] = memory_curves(summary)
    return {"points": conclude(summary), "table_of_lengths": length_table(summary), "memory_measured": measured}


def _read(path: Path, summarise: Callable[[Path], T], unread: list[Point]) -> T | None:
    """A file's summary; what is wrong with it goes to `unread`."""
    if not path.is_file():
        return None
    try:
        return summarise(path)
    except ValueError as error:
        unread.append(Point(f"{path.name} could not be read", str(error)))
        return None
