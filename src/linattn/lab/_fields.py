"""Whether a value read from a file is what a field wants: nothing later has to ask again."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

# Beyond this a whole number is damage; the largest state and the longest text are far below.
_LARGEST = 2**63


def read_field(value: Any, wanted: Any) -> Any:
    """A value as the field's type has it: numbers for "inf" and "nan", floats for whole numbers, all else as it is.

    Cost: linear in the value.

    Args:
        value: as `json.loads` gave it.
        wanted: a type: str, bool, int, float, a Literal, list[...], dict[str, ...], or one of these or None.

    Returns:
        The value.

    Raises:
        ValueError: if the value is of another type, or is a number or a text that no measurement writes.

    Example:
        >>> read_field("nan", float | None), read_field([1, 2], list[float])
        (nan, [1.0, 2.0])

    Source: none, a definition.
    """
    origin, options = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        if value is None and NoneType in options:
            return None
        return read_field(value, next(option for option in options if option is not NoneType))
    if origin is Literal and isinstance(value, str) and value in options:
        return value
    if origin is list and isinstance(value, list):
        return [read_field(one, options[0]) for one in value]
    if origin is dict and isinstance(value, dict):
        return {read_field(key, options[0]): read_field(one, options[1]) for key, one in value.items()}
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is str and isinstance(value, str) and _is_text(value):
        return value
    if wanted in (int, float) and not isinstance(value, bool):
        return _number(value, wanted)
    raise _refused(value, wanted)


def _number(value: Any, wanted: Any) -> int | float:
    """A whole number of a size that is counted, or any float; JSON writes those it has no number for as texts."""
    if isinstance(value, int) and abs(value) < _LARGEST:
        return float(value) if wanted is float else value
    if wanted is float and isinstance(value, float):
        return value
    if wanted is float and value in ("inf", "-inf", "nan"):
        return float(value)
    raise _refused(value, wanted)


def _is_text(value: str) -> bool:
    """Whether a text can be written: half a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _refused(value: Any, wanted: Any) -> ValueError:
    """What is wrong, without repeating more of a damaged value than a reader can use."""
    shown = ascii(value) if isinstance(value, str | float | bool | NoneType) else type(value).__name__
    kind = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    return ValueError(f"got {shown[:40]}, wanted {kind}")
