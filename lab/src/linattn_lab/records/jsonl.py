"""Files of JSON lines: one header row, then one row per measurement, each a dataclass under the name of its kind.

Numbers JSON does not have are written as the texts "inf", "-inf" and "nan"; what does not exist is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from linattn.records.files import atomic_file
from linattn.records.json_files import Reading, to_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

H = TypeVar("H", bound="DataclassInstance")
R = TypeVar("R", bound="DataclassInstance")

_REMEDY = "move the file away and measure again"


@dataclass(frozen=True)
class Form(Generic[H, R]):
    """Form of one sort of file, with its reader and writer."""

    subject: str  # what the file is, with its article, for messages
    header: type[H]  # the dataclass of the first line
    rows: Mapping[str, type[R]]  # the dataclasses of the other lines by the names of their kinds

    def write(self, path: Path, header: H, rows: Iterable[R]) -> None:
        """Write a file, row by row as it is measured, under a temporary name until it is whole."""
        with atomic_file(path) as file:
            file.writelines(self._line(record) for record in chain([header], rows))

    def read(self, path: Path) -> tuple[H, list[R]]:
        """Read what `write` wrote."""
        return self._records(_lines(path.read_bytes(), path), path)

    def so_far(self, path: Path) -> tuple[H, list[R]]:
        """Read what `extend` has written until now; a last line that was cut off is left out."""
        content = path.read_bytes()
        return self._records(_lines(content[: content.rfind(b"\n") + 1], path), path)

    def unfinished(self, path: Path) -> tuple[H, list[R]] | None:
        """Header and rows that an early end has left of a file written by `extend`."""
        if not path.is_file():
            return None
        try:
            return self.so_far(path)
        except ValueError:
            return None

    def extend(self, path: Path, header: H, kept: list[R], rows: Iterable[R]) -> None:
        """Write rows that survive an early end: each is in the file before the next is measured."""
        self.write(path, header, kept)
        # Line by line, so that an end by force takes no measured row with it.
        with path.open("a", encoding="utf-8", buffering=1) as file:
            for row in rows:
                file.write(self._line(row))

    def _records(self, lines: Iterable[str], path: Path) -> tuple[H, list[R]]:
        """Header and rows, each line checked."""
        records = [self._record(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
        header = next((record for record in records[:1] if isinstance(record, self.header)), None)
        rows = [cast(R, record) for record in records[1:] if not isinstance(record, self.header)]
        if header is None or len(rows) != len(records) - 1:
            raise ValueError(
                f"{path} is not {self.subject}: its first line, and no other, must be the header; measure again"
            )
        return header, rows

    def _record(self, line: str, place: str) -> H | R:
        """One line, read and checked against the fields of its kind."""
        kinds = dict(self._kinds())
        values = _parsed(line, place)
        name = values.pop("kind", None) if isinstance(values, dict) else None
        kind = kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ValueError(f"{place} is no row of {self.subject}; its kind must be one of {', '.join(kinds)}")
        return Reading(place, _REMEDY, finite=False).record(kind, values)

    def _line(self, record: DataclassInstance) -> str:
        """One record as a line."""
        kind = next(name for name, kind in self._kinds() if type(record) is kind)
        values = {"kind": kind, **to_json(record, finite=False)}
        return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"

    def _kinds(self) -> Iterator[tuple[str, type[H] | type[R]]]:
        """Every kind with its name."""
        yield "header", self.header
        yield from self.rows.items()


def _lines(content: bytes, path: Path) -> list[str]:
    """A file's lines, ended by a line feed and by nothing else: texts may hold other characters that break lines."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}); move it away and measure again") from None
    return lines if lines[-1] else lines[:-1]


def _parsed(line: str, place: str) -> Any:
    """Values of a line of JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is damaged ({error}); {_REMEDY}") from None
