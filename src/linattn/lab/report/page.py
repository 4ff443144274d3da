"""An audit's page."""

from __future__ import annotations

from pathlib import Path

from linattn.lab.report import _figures, _frontier, _tables
from linattn.lab.report._render import write_html
from linattn.lab.report.advice import advise, best_line
from linattn.lab.report.summary import SMALL_GAIN, Summary


def write_page(summary: Summary, path: Path) -> None:
    """Write the report of an audit, scripts and styles inside it; the page forbids itself every network access.

    Cost: about 5 MB, nearly all of it plotly's script.

    Args:
        summary: of an audit.
        path: the file, conventionally index.html; replaced in one step.

    Raises:
        OSError: if the file cannot be written.

    Example:
        See `tests/lab/test_report.py`.

    Source: none, a layout.
    """
    chosen = best_line(summary.lines) or summary.lines[0]
    figures = {
        "head-map": _figures.head_map(summary, chosen),
        "state-frontier": _frontier.state_frontier(summary),
        "flops-frontier": _frontier.flops_frontier(summary),
    }
    values = {
        "header": summary.header,
        "advice": advise(summary),
        "end_to_end": _tables.end_to_end(summary),
        "heads": _tables.heads(summary),
        "planned": summary.planned,
        "limited": bool(summary.limits),
        "chosen": f"{chosen.map} · {chosen.features:,}",
        "cells": _figures.head_cells(summary),
        "small_gain": SMALL_GAIN,
    }
    write_html(path, "audit.html.j2", figures, values)
