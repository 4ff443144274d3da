"""JSON files: written whole, read with errors that name the file and say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from linattn.records.atomic import atomic_file


def write_json(path: Path, values: Any) -> None:
    """Write plain values, as `to_json` gives them, as a file that is whole or absent."""
    with atomic_file(path) as file:
        json.dump(values, file, allow_nan=False, indent=1)


def read_json(path: Path, kind: str, remedy: str) -> Any:
    """Values of a JSON file; ValueError if it is none, is nested too deeply, or holds an integer of too many digits."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not a {kind}: it is nested too deeply; {remedy}") from None
    # Wrong syntax, wrong bytes, and integers of more digits than Python reads.
    except ValueError as error:
        raise ValueError(f"{path} is not a {kind}: it is no JSON ({error}); {remedy}") from None


def read_record(path: Path, kind: str, version: int, remedy: str) -> dict[str, Any]:
    """A JSON file that holds one record of a kind and a version."""
    values = read_json(path, kind, remedy)
    if not isinstance(values, dict) or values.get("kind") != kind:
        raise ValueError(f'{path} is not a {kind}: it wants "kind": "{kind}"; {remedy}')
    if type(values.get("version")) is not int or values["version"] != version:
        raise ValueError(f"{path} is a {kind} of version {values.get('version')!r}, this reads {version}; {remedy}")
    return {name: value for name, value in values.items() if name not in ("kind", "version")}
