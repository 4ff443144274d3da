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

    @property
    def path(self) -> str:
        """The file's path from the root; those of the laboratory begin with "lab/"."""
        room, _, rest = self.file.partition("/")
        return f"lab/src/linattn_lab/{rest}" if room == "lab" else f"src/linattn/{self.file}"
