"""The `linattn` command's subcommands, each in a file of its own that is imported when it is asked for.

That file has the options; its function imports what does the work. So help comes at once, without torch.
"""

import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from linattn import __version__

# What each does, as the first sentence of its function says: help is not to import them all.
COMMANDS = {
    "convert": "Convert a model's softmax attention to linear attention, and measure the error before and after.",
    "generate": "Generate text in constant memory, with a bounded KV cache (--budget) or a linear model.",
}
# Of the laboratory, a distribution of its own.
LAB_COMMANDS = ("audit", "bench", "report", "reproduce", "train")
GROUP = "linattn.commands"
"""Entry points of other distributions: a package with a file for each subcommand, and their `COMMANDS`."""


class Subcommand(NamedTuple):
    """A subcommand that is not imported yet."""

    words: str  # its first sentence
    module: str  # where its function is, which has its name


@cache
def subcommands() -> dict[str, Subcommand]:
    """The subcommands of the library and of installed distributions, by name, in alphabetical order."""
    packages = {__package__: COMMANDS} | {entry.module: entry.load() for entry in entry_points(group=GROUP)}
    every = {
        name: Subcommand(words, f"{package}.{name}")
        for package, commands in packages.items()
        for name, words in commands.items()
    }
    return dict(sorted(every.items()))


# Sizes, counts and seeds are below; torch takes no integers beyond.
MOST = 2**63 - 1

ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)
"""Errors that end a subcommand with a message; every other exception is a fault of its own and shows where it is."""

# How torch and Python say that a size is beyond the memory.
_NO_MEMORY = re.compile(r"Storage size calculation overflowed|can't allocate memory|out of memory|MemoryError")
# How torch says that another process does not answer, or has ended.
_NO_ANSWER = re.compile(r"Timed out waiting|Connection closed by peer|Connection reset by peer")


def error_line(error: Exception, command: str, options: Mapping[str, str]) -> str:
    """One line for the terminal; `options` are by the names of parameters, for errors that begin with one."""
    text = str(error) or type(error).__name__
    name = next((name for name in options if text.startswith((f"{name} ", f"{name}: "))), "")
    rank = int(os.environ.get("RANK") or 0)
    who = f"{command}, process {rank}" if rank else command
    remedy = ""
    if _NO_MEMORY.search(repr(error)):
        remedy = "; there is no such memory, give smaller numbers"
    elif _NO_ANSWER.search(str(error)):
        remedy = "; another process has ended, or is stopped: run the same command again to resume"
    return f"linattn {who}: {options.get(name, '')}{text.removeprefix(name)}{remedy}"


class _Subcommand(TyperCommand):
    """A subcommand whose whole numbers are those that torch takes, and whose errors are one line."""

    def invoke(self, ctx: Any) -> Any:
        """Refuse larger ones, as words that are no numbers are refused."""
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, int) and abs(value) > MOST:
                ctx.fail(f"Invalid value for '{parameter.opts[-1]}': {value} is beyond {MOST} in size.")
        try:
            return super().invoke(ctx)
        # The last one is of a reader that has enough, as head(1): click ends in silence.
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except ERRORS as error:
            # A count of tokens is `num_tokens` in the library, and `tokens` may be so in a subcommand.
            options = {f"{prefix}{one.name}": one.opts[-1] for one in self.params for prefix in ("", "num_")}
            typer.echo(error_line(error, ctx.info_name, options), err=True)
            raise typer.Exit(1) from None


class _Lazy(TyperGroup):
    """Subcommands that are imported when they are run or asked for help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        return list(subcommands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One subcommand."""
        asked = subcommands().get(cmd_name)
        if asked is None:
            if cmd_name in LAB_COMMANDS:
                sys.exit(f"linattn {cmd_name} needs linattn-lab: pip install 'linattn[lab]', in a clone ./lab")
            return None
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, cls=_Subcommand)(getattr(import_module(asked.module), cmd_name))
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The subcommands in help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.words) for name, one in subcommands().items()])


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
    """Bound KV caches, use linear attention, and measure the error of both on your model."""
