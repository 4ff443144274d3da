"""A benchmark's page."""

from __future__ import annotations

from pathlib import Path

from linattn.lab.report._bench_figures import memory_curves, time_curves
from linattn.lab.report._render import write_html
from linattn.lab.report.bench_summary import BenchSummary, conclude, length_table


def write_bench_page(summary: BenchSummary, path: Path) -> None:
    """Write the report of a benchmark, scripts and styles inside it; the page forbids itself every network access.

    Cost: about 5 MB, nearly all of it plotly's script.

    Args:
        summary: of a benchmark.
        path: the file, conventionally bench.html; replaced in one step.

    Raises:
        OSError: if the file cannot be written.

    Example:
        See `tests/lab/test_bench_report.py`.

    Source: none, a layout.
    """
    figures = {"time-curves": time_curves(summary)}
    measured = any(row.linear_memory is not None for row in summary.rows)
    if measured:
        figures["memory-curves"] = memory_curves(summary)
    values = {
        "header": summary.header,
        "points": conclude(summary),
        "table_of_lengths": length_table(summary),
        "memory_measured": measured,
    }
    write_html(path, "bench.html.j2", figures, values)
