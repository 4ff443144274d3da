"""The `linattn` command: thin, it only calls rooms."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# By every subcommand; linattn.hf and linattn.convert say what else theirs need.
_NEEDED = ("typer", "rich", "pydantic", "filelock")


def main() -> None:
    """Run the `linattn` command on the words of the command line.

    Exits with 0 when all went well; 1 with a message when packages that the subcommand needs are missing or it failed;
    2 for words it does not know; 130 when interrupted.
    """
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        sys.exit(f"linattn: the command needs {', '.join(missing)}, not installed here: pip install 'linattn[cli]'")
    # Only here, so that a missing package ends in the sentence above and not in a traceback.
    from linattn.cli.app import app

    app()
