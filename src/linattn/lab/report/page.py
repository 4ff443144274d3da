"""An audit's page."""

from __future__ import annotations

from pathlib import Path

from linattn.lab.report import _figures, _tables
from linattn.lab.report._render import write_html
from linattn.lab.report.advice import advise, best_at
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
    chosen = best_at(summary, max(summary.header.features)) or summary.lines[0]
    figures = {"head-map": _figures.head_map(summary, chosen), "error-curves": _figures.error_curves(summary)}
    values = {
        "header": summary.header,
        "advice": advise(summary),
        "end_to_end": _tables.end_to_end(summary),
        "heads": _tables.heads(summary),
        "beyond": _figures.beyond(summary),
        "chosen": f"{chosen.map} · {chosen.features:,}",
        "cells": _figures.head_cells(summary),
        "small_gain": SMALL_GAIN,
    }
    write_html(path, "audit.html.j2", figures, values)
