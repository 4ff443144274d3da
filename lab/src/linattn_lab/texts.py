"""Texts that audits read, and where they come from."""

import hashlib
import os
from dataclasses import dataclass
from typing import Self

from linattn.records.texts import read_text


@dataclass(frozen=True)
class Text:
    """A text and where it comes from."""

    source: str  # file name, or the name of the built-in text
    content: str  # the text

    @property
    def sha256(self) -> str:
        """Digest of the content in UTF-8: the built-in text changes with the version of Python."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    @classmethod
    def read(cls, file: str | os.PathLike[str] | None = None) -> Self:
        """A text file, or the English prose that comes with Python."""
        return cls("pydoc topics" if file is None else str(file), read_text(file))
