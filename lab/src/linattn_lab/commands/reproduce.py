"""The command `linattn reproduce`: its options; `linattn_lab.commands.claims` does the work, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    claims: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CLAIM]…", help="Names of the claims to measure (--list prints them); all if left out."
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full/--quick", help="Measure at the sizes of the sources, or at smaller ones, in minutes."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for claims.jsonl and index.html.")] = Path("report"),
    again: Annotated[
        bool, typer.Option("--again", help="Measure everything again; the former file is renamed.")
    ] = False,
    only_list: Annotated[
        bool, typer.Option("--list", help="Print the names of the claims, and measure nothing.")
    ] = False,
) -> None:
    """Measure published claims about linear attention, the Performer paper's among them: which hold?

    Each figure is saved as it is measured: run the command again to resume. The exit status is 1 if an experiment
    crashed or could not decide. A claim that fails is a result: the status is 0.
    """
    # Help is not to wait for torch.
    from linattn_lab.commands.claims import list_claims, measure_claims

    if only_list:
        list_claims()
    else:
        measure_claims(claims or [], out, setting="full" if full else "quick", again=again)
