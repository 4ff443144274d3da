"""The command `linattn report` as the terminal shows it."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="The folder given as --out to audit, bench and reproduce.")] = Path(
        "report"
    ),
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json, the page's figures.")] = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON Schema of the figures, which describes every field, and end."),
    ] = False,
) -> None:
    """Write the report's page again from its files, open it, or print its figures as JSON.

    Measures nothing. The page is FOLDER/index.html, and FOLDER/report.json has its figures.
    """
    # Help is not to wait for torch.
    from rich.console import Console
    from rich.markup import escape

    from linattn.cli.terminal import ending
    from linattn_lab.report import FIGURES, TWIN, report_schema, write_report

    if schema:
        typer.echo(json.dumps(report_schema(), indent=1))
        return
    console = Console(stderr=as_json)
    with ending(console, lambda: f"The files of {folder} are as they were, or whole and new."):
        if not any((folder / name).is_file() for name in FIGURES):
            raise FileNotFoundError(
                f"{folder} holds none of {', '.join(FIGURES)}; name the folder that linattn audit, bench or reproduce "
                f"wrote to, or run linattn audit --out {folder}"
            )
        page = write_report(folder)
        twin = page.with_name(TWIN)
        if as_json:
            typer.echo(twin.read_text(encoding="utf-8"))
        console.print(f"Written: {escape(str(page))} and {escape(str(twin))}", highlight=False)
        if show and not webbrowser.open(page.resolve().as_uri()):
            raise RuntimeError(f"no browser was found here to open the page; open {page.resolve()} in one")
