"""The page of the command line: what --help says of every command, as text.

Read by docs/write_tables.py, which writes docs/cli.md.
"""

from __future__ import annotations

import re

from typer.testing import CliRunner

from linattn.cli.app import app, subcommands
from site_tables import table

_JOBS = (
    ("generate text with a bounded KV cache", "`linattn generate MODEL --budget 512 --prompt TEXT`", "`cli`, `hf`"),
    ("measure what a bounded KV cache loses", "`linattn audit MODEL --budget 512 --text FILE`", "`lab`, `hf`"),
    ("measure the error of linear attention", "`linattn audit MODEL --text FILE`", "`lab`, `hf`"),
    ("find the length from which it is faster", "`linattn bench --lengths 512,2048,8192`", "`lab`"),
    ("replace softmax by a feature map, and train it", "`linattn convert MODEL OUT --minutes 15`", "`cli`, `convert`"),
    ("train a language model from nothing", "`linattn train OUT --minutes 15`", "`lab`, `train`"),
    ("open the report of what was measured", "`linattn report --open`", "`lab`"),
    ("measure published claims", "`linattn reproduce --quick`", "`lab`"),
)
# Columns of a help text: what a page of 1,280 px has room for, and a phone can scroll.
_WIDTH = 100


def cli_page() -> str:
    """The page: the command, then each subcommand under a heading of its own."""
    parts = [
        "# The command line",
        "",
        table(("to", "run", "[extras](install.md)"), _JOBS),
        "",
        "`python -m linattn` is the same command. Below is what `--help` prints for each.",
        "",
        "## linattn",
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
