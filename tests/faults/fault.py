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
        """The file's path from the root; those of the laboratory and of the kernels begin with "lab/" and "gpu/"."""
        room, _, rest = self.file.partition("/")
        sources = {"lab": "lab/src/linattn_lab", "gpu": "gpu/src/linattn_triton"}
        return f"{sources[room]}/{rest}" if room in sources else f"src/linattn/{self.file}"
