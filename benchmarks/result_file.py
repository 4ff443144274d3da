"""The file of all benchmarks' rows: new rows take the place of former ones; the file is whole, or as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from linattn.records.files import atomic_file

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, in order; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file."""
    with atomic_file(path) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def put_in_place(rows: list[Row], new: list[Row], is_replaced: Callable[[Row], bool]) -> list[Row]:
    """Rows with new ones where the first of those they replace was, or at the end."""
    where = next((number for number, row in enumerate(rows) if is_replaced(row)), len(rows))
    kept = [row for row in rows[where:] if not is_replaced(row)]
    return [*rows[:where], *new, *kept]
