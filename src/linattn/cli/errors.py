"""Errors of a subcommand in one line: what was got and wanted, under the option's name, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)
"""What ends a subcommand with a message; every other exception is a fault of its own and shows where it is."""

# How torch and Python say that a size is beyond the memory.
_NO_MEMORY = re.compile(r"Storage size calculation overflowed|can't allocate memory|out of memory|MemoryError")
# How torch says that another process does not answer, or has ended.
_NO_ANSWER = re.compile(r"Timed out waiting|Connection closed by peer|Connection reset by peer")


def error_line(error: Exception, command: str, options: Mapping[str, str]) -> str:
    """One line for the terminal; `options` are by the names of parameters, for errors that begin with one.

    Example:
        >>> error_line(ValueError("num_tokens must be at least 1, got 0"), "convert", {"num_tokens": "--tokens"})
        'linattn convert: --tokens must be at least 1, got 0'
    """
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
