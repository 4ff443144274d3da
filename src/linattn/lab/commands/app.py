"""The `linattn` command's subcommands, each in a file of its own that is imported when it is asked for.

Help and version come at once: torch alone is imported by then, since `import linattn` does so.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from linattn import __version__

# What each does, as the first sentence of its function says: help is not to import them all.
COMMANDS = {
    "audit": "Measure how wrong linear attention is on a model: every layer, head and method, and the whole model.",
    "bench": "Measure from which length on linear attention is faster than exact attention, on your shapes.",
    "convert": "Turn a model's softmax attention into linear attention, and say how wrong it is before and after.",
    "generate": "Go on with a text, token by token, in constant memory where attention is linear or has a budget.",
    "report": "Write the page of what was measured anew, open it, or print its figures as JSON.",
    "reproduce": "Measure the claims of the founding texts, of the Performer paper and of recall, and say which hold.",
    "train": "Train a language model of bytes with linear or softmax attention, and say how many bits a byte costs.",
}


# Sizes, counts and seeds are below; torch takes no integers beyond.
MOST = 2**63 - 1


class _Bounded(TyperCommand):
    """A subcommand whose whole numbers are those that torch takes."""

    def invoke(self, ctx: Any) -> Any:
        """Refuse larger ones, as words that are no numbers are refused."""
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, int) and abs(value) > MOST:
                ctx.fail(f"Invalid value for '{parameter.opts[-1]}': {value} is beyond {MOST} in size.")
        return super().invoke(ctx)


class _Lazy(TyperGroup):
    """Subcommands that are imported when they are run or asked for help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One subcommand."""
        if cmd_name not in COMMANDS:
            return None
        try:
            module = import_module(f"linattn.lab.commands.{cmd_name}")
        except ImportError as error:
            sys.exit(f"linattn {cmd_name}: {error}")
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, cls=_Bounded)(getattr(module, cmd_name))
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The subcommands in help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(cls=_Lazy, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def _print_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        typer.echo(f"linattn {__version__}")
        raise typer.Exit


@app.callback()
def linattn(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Kernel attention in linear time that always says how wrong it is."""
