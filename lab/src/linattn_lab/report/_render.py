"""A report as one HTML file that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from linattn.records.files import atomic_file
from linattn.records.json_files import to_json
from linattn_lab.report._text import counted
from linattn_lab.report.charts import Chart


def write_html(path: Path, template: str, figures: Mapping[str, Chart], values: Mapping[str, object]) -> None:
    """Fill a template and write it, scripts and styles inside; the page forbids itself every network access."""
    with atomic_file(path) as file:
        file.write(rendered(template, figures, values))


def rendered(template: str, figures: Mapping[str, Chart], values: Mapping[str, object]) -> str:
    """A template, filled: the text of `write_html`."""
    drawn = {name: to_json(figure) for name, figure in figures.items()}
    return _environment().get_template(template).render({**values, "figures": drawn, "counted": counted})


@cache
def _environment() -> Environment:
    """Where templates are looked up and compiled, once."""
    return Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=PackageLoader("linattn_lab.report", "templates"),
    )
