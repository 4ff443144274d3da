"""Dataclasses as JSON Schema: what `to_json` writes of them, field by field, in the words of their docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}
# Of an Attributes section: a name, and its words up to the next name.
_FIELD = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)


def json_schema(kind: type, *, finite: bool = True) -> dict[str, Any]:
    """The JSON Schema of what `to_json` writes of a record.

    Args:
        kind: a dataclass whose docstring says under Attributes what each field is; so do those of the records in it.
        finite: as of `to_json`: False allows the texts "inf", "-inf" and "nan" for numbers.

    Returns:
        The schema, of draft 2020-12: every field there, none surplus, each described.

    Raises:
        ValueError: if a field has no words, or two records share a name.
        TypeError: if a field's type is none that JSON has.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Cake:
        ...     '''A cake.
        ...
        ...     Attributes:
        ...         eggs: how many it takes.
        ...     '''
        ...     eggs: int
        >>> json_schema(Cake)["$defs"]["Cake"]["properties"]
        {'eggs': {'description': 'how many it takes.', 'type': 'integer'}}

    Source: JSON Schema, draft 2020-12.
    """
    kinds: dict[str, type] = {}
    records: dict[str, Any] = {}
    top = _value(kind, kinds, finite=finite)
    # Describing one record finds others.
    while missing := [name for name in kinds if name not in records]:
        for name in missing:
            records[name] = _record(kinds[name], kinds, finite=finite)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": records}


def field_words(kind: type) -> dict[str, str]:
    """Words of a record's docstring on each field, under Attributes.

    Args:
        kind: the dataclass.

    Returns:
        Words by field, in the order of the fields.

    Raises:
        ValueError: if a field has none.

    Example:
        See `json_schema`.
    """
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    told = {name: " ".join(words.split()) for name, words in _FIELD.findall(section)}
    wordless = [name for name in get_type_hints(kind) if name not in told]
    if wordless:
        raise ValueError(
            f"{kind.__name__} says nothing of {', '.join(wordless)}; write words under Attributes in its docstring"
        )
    return {name: told[name] for name in get_type_hints(kind)}


def _record(kind: type, kinds: dict[str, type], *, finite: bool) -> dict[str, Any]:
    """One record's own schema."""
    hints, words = get_type_hints(kind), field_words(kind)
    return {
        "description": (inspect.getdoc(kind) or "").partition("\n")[0],
        "type": "object",
        "properties": {
            name: {"description": words[name], **_value(hints[name], kinds, finite=finite)} for name in hints
        },
        "required": list(hints),
        "additionalProperties": False,
    }


def _value(wanted: Any, kinds: dict[str, type], *, finite: bool) -> dict[str, Any]:
    """The schema of a type; records that it names are entered into `kinds`."""
    origin, options = get_origin(wanted) or wanted, get_args(wanted)
    if origin in (Union, UnionType):
        return {"anyOf": [_value(one, kinds, finite=finite) for one in options]}
    if origin is Literal:
        return {"enum": list(options)}
    if wanted is float and not finite:
        return {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
    if wanted in _PLAIN:
        return {"type": _PLAIN[wanted]}
    if origin is tuple and Ellipsis not in options:
        items = [_value(one, kinds, finite=finite) for one in options]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _value(options[0], kinds, finite=finite)}
    if origin in (dict, Mapping) and options[0] is str:
        return {"type": "object", "additionalProperties": _value(options[1], kinds, finite=finite)}
    if not isinstance(wanted, type) or not get_type_hints(wanted):
        raise TypeError(f"a record of JSON holds numbers, texts, truths, lists, objects and records, got {wanted}")
    if kinds.setdefault(wanted.__name__, wanted) is not wanted:
        raise ValueError(f"two records are called {wanted.__name__}; give one another name")
    return {"$ref": f"#/$defs/{wanted.__name__}"}
