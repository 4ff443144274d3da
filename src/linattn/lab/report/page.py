"""The report as one HTML file that needs nothing but a browser."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from linattn.lab.files import replacing
from linattn.lab.report import _figures, _tables
from linattn.lab.report.advice import advise, best_at
from linattn.lab.report.summary import SMALL_GAIN, Summary


def write_page(summary: Summary, path: Path) -> None:
    """Write the report, scripts and styles inside it; the page forbids itself every network access.

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
    template = files("linattn.lab.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    chosen = best_at(summary, max(summary.header.features)) or summary.lines[0]
    page = environment.from_string(template).render(
        header=summary.header,
        advice=advise(summary),
        end_to_end=_tables.end_to_end(summary),
        heads=_tables.heads(summary),
        beyond=_figures.beyond(summary),
        chosen=f"{chosen.map} · {chosen.features:,}",
        cells=_figures.head_cells(summary),
        head_map=json.loads(_figures.head_map(summary, chosen).to_json()),
        error_curves=json.loads(_figures.error_curves(summary).to_json()),
        small_gain=SMALL_GAIN,
        plotly=get_plotlyjs(),
    )
    with replacing(path) as file:
        file.write(page)
