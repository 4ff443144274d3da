"""Dataclasses and NamedTuples as JSON values, and back with every field checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

# Beyond this a whole number is damage: no size, count or seed reaches it, nor does a tensor hold it.
_LARGEST = 2**63
# Characters of a damaged value that an error repeats.
_SHOWN = 40
_SEQUENCES, _MAPPINGS = (list, tuple, Sequence), (dict, Mapping)


def to_json(value: Any, *, finite: bool = True, default: Callable[[Any], Any] | None = None) -> Any:
    """Dataclasses, NamedTuples and what holds them, as values that JSON has.

    Args:
        value: numbers, texts, truths, None, records, and mappings and sequences of those.
        finite: False writes the numbers that JSON does not have as the texts "inf", "-inf" and "nan"; True leaves them,
            for a writer that refuses them.
        default: what to make of every other value; None leaves it as it is.

    Returns:
        Dictionaries, lists and plain values.

    Example:
        >>> from dataclasses import make_dataclass
        >>> to_json([make_dataclass("Cake", ["eggs"])(3), float("inf")], finite=False)
        [{'eggs': 3}, 'inf']
    """
    if isinstance(value, float):
        return value if finite or math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: to_json(held, finite=finite, default=default) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(held, finite=finite, default=default) for held in value]
    return value if default is None else default(value)


@dataclass(frozen=True)
class Reading:
    """How JSON values are read into records, and where they come from.

    Attributes:
        place: the file, with the line or the part of it; every error begins so.
        remedy: what to do about another file; every error ends so.
        finite: whether a number that is not finite is refused. False takes the texts "inf", "-inf" and "nan" for
            numbers, as `to_json` writes them.
        readers: for types that JSON does not have, a function from what JSON held to the value; its ValueError says
            what is wrong, without the place.
    """

    place: str
    remedy: str
    finite: bool = True
    readers: Mapping[Any, Callable[[Any], Any]] = field(default_factory=dict)

    def record(self, kind: type[T], values: Any) -> T:
        """The record of a kind: every field there, none surplus, each of its type, records in records included.

        Args:
            kind: a dataclass or NamedTuple. Fields of type Any are taken as they are; those with a default may be
                missing, as in files of earlier versions.
            values: what JSON held.

        Returns:
            The record; whole numbers of float fields are floats, lists of tuple fields tuples.

        Raises:
            ValueError: if a field is missing, unknown or of another type, with the place, the field, what was got and
                what was wanted.

        Example:
            >>> from dataclasses import make_dataclass
            >>> Reading("a.json", "bake it again").record(make_dataclass("Cake", [("eggs", int)]), {"eggs": "3"})
            Traceback (most recent call last):
            ValueError: a.json: eggs must be a finite int, got '3'; bake it again
        """
        return kind(**self.fields(kind, values))

    def fields(self, kind: type, values: Any) -> dict[str, Any]:
        """The fields of `record` by name."""
        wanted, needed = _types(kind)
        if not isinstance(values, dict):
            wrong = [f"got {type(values).__name__}"]
        else:
            wrong = [f"{name} is missing" for name in sorted(needed - set(values))]
            wrong += [f"there is no {name[:_SHOWN]!r}" for name in sorted(set(values) - set(wanted))]
        if wrong:
            raise ValueError(f"{self.place}: {', '.join(wrong)}, wanted the fields {sorted(wanted)}; {self.remedy}")
        return {name: self._value(value, wanted[name], name) for name, value in values.items()}

    def at_least(self, record: T, **least: float) -> T:
        """A record, once numbers of it are no less than they can be; None is no number.

        Args:
            record: what `record` gave.
            least: the least number of each field, by its name.

        Raises:
            ValueError: if a number is less, with the place, the field and both numbers.

        Example:
            >>> from dataclasses import make_dataclass
            >>> Reading("a.json", "bake it again").at_least(make_dataclass("Cake", ["eggs"])(-3), eggs=0)
            Traceback (most recent call last):
            ValueError: a.json: eggs must be at least 0, got -3; bake it again
        """
        for name, number in least.items():
            value = getattr(record, name)
            if value is not None and not value >= number:
                raise ValueError(f"{self.place}: {name} must be at least {number}, got {value}; {self.remedy}")
        return record

    def _value(self, value: Any, wanted: Any, path: str, named: Any = None) -> Any:
        """A value as a type has it; `path` leads to it from the record's field on, errors name the type `named`."""
        origin, options = get_origin(wanted) or wanted, get_args(wanted)
        if wanted in self.readers:
            try:
                return self.readers[wanted](value)
            except ValueError as error:
                raise ValueError(f"{self.place}: {path} {error}; {self.remedy}") from None
        if origin in (Union, UnionType):
            if value is None and NoneType in options:
                return None
            return self._value(value, next(one for one in options if one is not NoneType), path, wanted)
        if origin in _SEQUENCES and isinstance(value, list):
            items = [self._value(one, options[0], f"{path}[{place}]") for place, one in enumerate(value)]
            return tuple(items) if origin is tuple else items
        if origin in _MAPPINGS and isinstance(value, dict):
            return {
                self._value(name, options[0], f"a key of {path}"): self._value(one, options[1], f"{path}[{name!r}]")
                for name, one in value.items()
            }
        if isinstance(wanted, type) and (is_dataclass(wanted) or hasattr(wanted, "_fields")):
            inner = Reading(f"{self.place}, {path}", self.remedy, self.finite, self.readers)
            return inner.record(wanted, value)
        if wanted is not Any and not _fits(value, wanted, finite=self.finite):
            raise self._refused(value, named or wanted, path)
        return float(value) if wanted is float else value

    def _refused(self, value: Any, wanted: Any, path: str) -> ValueError:
        """Error that says what is wrong, without repeating more of a damaged value than a reader can use."""
        plain = isinstance(value, str | int | float | NoneType)
        shown = ascii(value)[:_SHOWN] if plain else type(value).__name__
        words = _in_words(wanted, finite=self.finite)
        return ValueError(f"{self.place}: {path} must be {words}, got {shown}; {self.remedy}")


@cache
def _types(kind: type) -> tuple[dict[str, Any], set[str]]:
    """The type of each field, and the fields without a default."""
    if is_dataclass(kind):
        needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    else:
        needed = set(getattr(kind, "_fields", ())) - set(getattr(kind, "_field_defaults", {}))
    return get_type_hints(kind), needed


def _fits(value: Any, wanted: Any, *, finite: bool) -> bool:
    """Whether a value of JSON is of a plain type; in Python True is an integer, in a record it is none."""
    if get_origin(wanted) is Literal:
        # 1 is neither True nor 1.0.
        return any(value == one and type(value) is type(one) for one in get_args(wanted))
    if wanted is str:
        # Half a surrogate pair cannot be written.
        return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    if isinstance(value, int) and wanted in (int, float):
        return abs(value) < _LARGEST
    if wanted is float and isinstance(value, float):
        return not finite or math.isfinite(value)
    return wanted is float and not finite and value in ("inf", "-inf", "nan")


def _in_words(wanted: Any, *, finite: bool) -> str:
    """A type as an error names it."""
    origin = get_origin(wanted) or wanted
    if origin is Literal:
        return f"one of {', '.join(map(repr, get_args(wanted)))}"
    if origin in _MAPPINGS:
        return "an object"
    if origin in _SEQUENCES:
        return "a list"
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    return f"a finite {name}" if finite and ("int" in name or "float" in name) else f"a {name}"
