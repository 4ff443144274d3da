"""A report as one HTML file that needs nothing but a browser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from linattn.records.atomic import atomic_file


def write_html(path: Path, template: str, figures: Mapping[str, go.Figure], values: Mapping[str, object]) -> None:
    """Fill a template and write it, scripts and styles inside; the page forbids itself every network access.

    Args:
        path: the file; replaced in one step.
        template: a file of templates/.
        figures: charts by the id of their place on the page.
        values: what else the template names.

    Raises:
        OSError: if the file cannot be written.
    """
    drawn = {name: json.loads(figure.to_json()) for name, figure in figures.items()}
    page = _environment().get_template(template).render({**values, "figures": drawn, "plotly": get_plotlyjs()})
    with atomic_file(path) as file:
        file.write(page)


@cache
def _environment() -> Environment:
    """Where templates are looked up and compiled, once."""
    return Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=PackageLoader("linattn.lab.report", "templates"),
    )
