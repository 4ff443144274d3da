"""The command `linattn reproduce`: its options; `linattn_lab.commands.claims` does the work, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    claims: Annotated[
        list[str] | None, typer.Argument(metavar="[CLAIM]…", help="Names of claims, see --list; all if left out.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Take the sizes of the sources, or smaller ones that take minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for claims.jsonl and index.html.")] = Path("report"),
    again: Annotated[bool, typer.Option("--again", help="Discard what was measured: its file is renamed.")] = False,
    only_list: Annotated[bool, typer.Option("--list", help="Name the claims and measure nothing.")] = False,
) -> None:
    """Measure the claims of the founding texts and of the Performer paper, and say which hold.

    Each figure is saved as it is measured: run the command again to resume. The exit status is 1 if an experiment
    crashed or could not decide; a claim that fails is a result.
    """
    # Help is not to wait for torch.
    from linattn_lab.commands.claims import list_claims, measure_claims

    if only_list:
        list_claims()
    else:
        measure_claims(claims or [], out, setting="full" if full else "quick", again=again)
