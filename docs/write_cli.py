"""The page of the command line: what --help says of every command, as text.

Read by docs/write_tables.py, which writes docs/cli.md.
"""

from __future__ import annotations

import re

from typer.testing import CliRunner

from linattn.cli.app import app, subcommands

# Columns of a help text: what a page of 1,280 px has room for, and a phone can scroll.
_WIDTH = 100


def cli_page() -> str:
    """The page: the command, then each subcommand under a heading of its own."""
    parts = [
        "# The command line",
        "",
        "The extra `cli` installs `linattn` with `convert` and `generate`; the extra `lab` adds the other commands.",
        "`python -m linattn` is the same command. This page is written from what `--help` says.",
        "",
        *_help([]),
    ]
    for name in subcommands():
        parts += ["", f"## linattn {name}", "", *_help([name])]
    return "\n".join(parts) + "\n"


def _help(words: list[str]) -> list[str]:
    """A block of what --help prints."""
    found = CliRunner().invoke(app, [*words, "--help"], prog_name="linattn", env={"COLUMNS": str(_WIDTH)}, color=False)
    if found.exit_code != 0:
        raise RuntimeError(f"linattn {' '.join(words)} --help ended with {found.exit_code}: {found.output}")
    text = "\n".join(line.rstrip() for line in found.output.strip().splitlines())
    return ["```text", re.sub(r"\x1b\[[0-9;]*m", "", text), "```"]
