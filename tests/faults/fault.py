"""One fault."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One edit of one file, and the tests expected to turn red."""

    name: str
    file: str
    old: str
    new: str
    tests: str
