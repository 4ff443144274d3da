"""Dataclasses as JSON Schema: what `to_json` writes of them, field by field, in the words of their docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from linattn.records.json_files import NOT_FINITE

# Of an Attributes section: a name, and its words up to the next name.
_FIELD = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of what `to_json` writes of a record, "inf", "-inf" and "nan" being numbers.

    Source: JSON Schema, draft 2020-12.
    """
    schema = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=_Described)
    inner = schema.pop("$defs", {})
    top = {"$ref": f"#/$defs/{kind.__name__}", "$defs": {kind.__name__: schema, **inner}}
    return {"$schema": GenerateJsonSchema.schema_dialect, **top}


def field_words(kind: type) -> dict[str, str]:
    """Words of a record's docstring on each field, under Attributes."""
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    told = {name: " ".join(words.split()) for name, words in _FIELD.findall(section)}
    wordless = [name for name in get_type_hints(kind) if name not in told]
    if wordless:
        raise ValueError(
            f"{kind.__name__} says nothing of {', '.join(wordless)}; write words under Attributes in its docstring"
        )
    return {name: told[name] for name in get_type_hints(kind)}


class _Described(GenerateJsonSchema):
    """pydantic's schema, with the docstrings' words in place of titles and defaults."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        kind = schema["cls"]
        properties = super().dataclass_schema(schema)["properties"]
        for name, words in field_words(kind).items():
            rest = {key: value for key, value in properties[name].items() if key not in ("title", "default")}
            properties[name] = {"description": words, **rest}
        return {
            "description": (inspect.getdoc(kind) or "").partition("\n")[0],
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"enum": list(NOT_FINITE)}]}
