"""The `linattn` command: thin, it only calls rooms."""

import os
import signal
import sys
from importlib.util import find_spec
from io import TextIOWrapper

# By every subcommand; linattn.hf and linattn.convert say what else theirs need.
_NEEDED = ("typer", "rich", "pydantic", "filelock")


def main() -> None:
    """Run the `linattn` command; exit with 0, 1 (failed, a package missing), 2 (unknown words) or 130 (interrupted)."""
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        sys.exit(f"linattn: the command needs {', '.join(missing)}, not installed here: pip install 'linattn[cli]'")
    # Streams that the caller has closed, as by <&- in a shell, are None, which click and rich do not take.
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout, sys.stderr = (x or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") for x in (sys.stdout, sys.stderr))
    if isinstance(sys.stdout, TextIOWrapper):  # What its encoding lacks is escaped, as on the standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Until the work begins, by `ending`: Python swallows what is raised as objects are destroyed, as in imports.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only here, so that a missing package ends in the sentence above and not in a traceback.
    from linattn.cli.app import app

    app()
