"""The `linattn` command's subcommands, each in a file of its own."""

from __future__ import annotations

import typer

from linattn.lab.commands.audit import audit
from linattn.lab.commands.bench import bench
from linattn.lab.commands.convert import convert
from linattn.lab.commands.reproduce import reproduce

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def linattn() -> None:
    """Kernel attention in linear time that always says how wrong it is."""


app.command()(audit)
app.command()(bench)
app.command()(convert)
app.command()(reproduce)
