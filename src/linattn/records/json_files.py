"""Dataclasses and NamedTuples as JSON, and back with every field checked by pydantic; files, whole or absent."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Any, NoReturn, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator, core_schema

from linattn.records.files import atomic_file

T = TypeVar("T")

NOT_FINITE = ("inf", "-inf", "nan")
"""Texts for the numbers that JSON does not have."""
# Beyond this a whole number is damage: no size, count or seed reaches it, nor does a tensor hold it.
_LARGEST = 2**63
# Characters of a damaged value, and fields, that an error names.
_SHOWN, _NAMED = 40, 3


def to_json(value: Any, *, finite: bool = True) -> Any:
    """Dataclasses, NamedTuples and what holds them, as JSON values; unless `finite`, inf and nan are texts."""
    if isinstance(value, float):
        return value if finite or math.isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: to_json(item, finite=finite) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, finite=finite) for item in value]
    return value


@dataclass(frozen=True)
class Reading:
    """How JSON values are read into records, and where they come from."""

    place: str  # the file, with the line or the part of it; every error begins so
    remedy: str  # what to do about another file; every error ends so
    # whether a number that is not finite is refused. False takes the texts "inf", "-inf" and "nan" for numbers, as
    # `to_json` writes them
    finite: bool = True

    def refuse(self, words: str) -> NoReturn:
        """Say what is wrong, where, and what to do."""
        raise ValueError(f"{self.place}: {words}; {self.remedy}") from None

    def record(self, kind: type[T], values: Any) -> T:
        """The record of a dataclass or NamedTuple from what JSON held, records within it included, all checked."""
        # A field may be `Annotated` with bounds; one of type Any is taken as it is; one with a default may be missing,
        # as in files of earlier versions.
        try:
            # From JSON, where a list may be a tuple and an object a record, and nothing else is converted.
            (record,) = _validator(cast(type, kind), self.finite).validate_json(json.dumps([values]))
        except ValidationError as error:
            details = error.errors(include_url=False)
            words = [_in_words(one, kind, values) for one in details[:_NAMED]]
            if len(details) > _NAMED:
                words.append(f"and {len(details) - _NAMED} more")
            self.refuse(", ".join(words))
        except RecursionError:
            raise ValueError(f"{self.place} is nested too deeply; {self.remedy}") from None
        return cast(T, record)


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


@cache
def _validator(kind: type, finite: bool) -> SchemaValidator:
    """The check of a list of records."""
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=not finite)
    form: Any = GenericAlias(list, kind)
    return SchemaValidator(_bounded(TypeAdapter(form, config=config).core_schema, finite))


def _bounded(schema: Any, finite: bool) -> Any:
    """A schema whose whole numbers are within bounds, and whose other numbers may be texts where not all are finite."""
    if isinstance(schema, list | tuple):
        return [_bounded(one, finite) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "int":
        return {"lt": _LARGEST, "gt": -_LARGEST, **schema}
    if schema.get("type") == "float" and not finite:
        return core_schema.no_info_before_validator_function(_number, cast(core_schema.CoreSchema, schema))
    return {name: _bounded(one, finite) for name, one in schema.items()}


def _number(value: Any) -> Any:
    """A number from its text; every other value is left to the check of its type."""
    return float(value) if value in NOT_FINITE else value


def _in_words(error: ErrorDetails, kind: type, values: Any) -> str:
    """An error in words, without repeating more of a damaged value than a reader can use."""
    _, *steps = error["loc"] or (0,)
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:_SHOWN]}" for step in steps).lstrip(".")
    wanted = f", wanted the fields {sorted(get_type_hints(kind))}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{path} is missing{wanted * (len(steps) == 1)}"
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"there is no {path!r}{wanted * (len(steps) == 1)}"
    if error["type"] == "json_invalid":
        held = values.items() if isinstance(values, dict) else ()
        texts = [(name, json.dumps(value, ensure_ascii=False)) for name, value in held]
        broken = [name[:_SHOWN] for name, text in texts if text.encode(errors="ignore").decode() != text]
        return f"{', '.join(broken)} must be text that can be written, got half a character" if broken else error["msg"]
    value = error["input"]
    shown = ascii(value)[:_SHOWN] if value is None or isinstance(value, str | int | float) else type(value).__name__
    return f"{path or 'it'} {error['msg'].replace('Input should', 'must')}, got {shown}{wanted * (not path)}"
