"""Records in JSON files, read with every field checked."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
}

_LARGEST = 2**63 - 1


def read_json(path: Path, kind: str, remedy: str) -> Any:
    """What a JSON file holds.

    Cost: linear in the file.

    Args:
        path: the file, which exists.
        kind: what it should be, in words; errors call the file so.
        remedy: what to do about another file, the end of every error.

    Returns:
        The values as `json` gives them.

    Raises:
        ValueError: if the file is no JSON, is nested beyond what Python reads, or holds an integer of too many digits.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> _ = path.write_text("[" * 99999)
        >>> read_json(path, "cake", "bake it again")
        Traceback (most recent call last):
        ValueError: ...a.json is not a cake: it is nested too deeply; bake it again

    Source: none, a format.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not a {kind}: it is nested too deeply; {remedy}") from None
    # Wrong syntax, wrong bytes, and integers of more digits than Python reads.
    except ValueError as error:
        raise ValueError(f"{path} is not a {kind}: it is no JSON ({error}); {remedy}") from None


def read_record(path: Path, kind: str, version: int, remedy: str) -> dict[str, Any]:
    """A JSON file that holds one record of a kind and a version.

    Cost: linear in the file.

    Args:
        path: the file, which exists.
        kind: what its "kind" must be, in words; errors call the file so.
        version: what its "version" must be.
        remedy: what to do about another file, the end of every error.

    Returns:
        The record, "kind" and "version" included.

    Raises:
        ValueError: if the file is no JSON, or of another kind or version.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> _ = path.write_text('{"kind": "cake", "version": 2, "eggs": 3}')
        >>> read_record(path, "cake", 2, "bake it again")["eggs"]
        3

    Source: none, a format.
    """
    found = read_json(path, kind, remedy)
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise ValueError(f'{path} is not a {kind}: it wants "kind": "{kind}"; {remedy}')
    if found.get("version") != version:
        raise ValueError(f"{path} is a {kind} of version {found.get('version')!r}, this reads {version}; {remedy}")
    return found


def check_fields(values: Any, kind: type[DataclassInstance], place: str, remedy: str) -> dict[str, Any]:
    """The fields of a dataclass, all there and, where these are plain, of their types.

    Cost: none worth naming.

    Args:
        values: what JSON held.
        kind: the dataclass whose fields are wanted; fields of other types than str, bool, int, float and None are for
            the caller to check.
        place: where it was, for errors.
        remedy: what to do about it, the end of every error.

    Returns:
        The values by field, a new dictionary.

    Raises:
        ValueError: if a field is missing, unknown, or of another type, or a number is not finite.

    Example:
        >>> from dataclasses import make_dataclass
        >>> check_fields({"eggs": 3}, make_dataclass("Cake", [("eggs", "int")]), "a.json", "bake it again")
        {'eggs': 3}

    Source: none, a format.
    """
    wanted = {each.name: str(each.type) for each in fields(kind)}
    if not isinstance(values, dict) or set(values) != set(wanted):
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{place}: got {got}, wanted the fields {sorted(wanted)}; {remedy}")
    for name, written in wanted.items():
        value, types = values[name], _TYPES.get(written)
        # In Python, True is an integer; in a record it is none.
        mixed = isinstance(value, bool) and written != "bool"
        unfit = types is not None and (mixed or not isinstance(value, types) or _is_beyond(value))
        if unfit or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{place}: {name} must be a finite {written}, got {value!r}; {remedy}")
    return dict(values)


def _is_beyond(value: Any) -> bool:
    """Whether an integer is none that a tensor's size or a count can be, nor a float hold."""
    return isinstance(value, int) and abs(value) > _LARGEST
