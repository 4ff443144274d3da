"""The page of report.json: every record and field of its schema, as tables.

Read by docs/write_tables.py, which writes docs/report_json.md.
"""

from __future__ import annotations

from typing import Any

from linattn_lab.report import report_schema
from site_tables import table


def schema_page() -> str:
    """The page: the file's own fields, then each record's under a heading of its own."""
    schema = report_schema()
    top = schema["$ref"].rpartition("/")[2]
    records = schema["$defs"]
    parts = [
        "---",
        "search:",
        "  boost: 0.5",
        "---",
        "",
        "# The figures of a report as JSON",
        "",
        "Beside every page there is `report.json` with its figures; `linattn report FOLDER --json` prints them, and",
        "`linattn report --schema` prints their JSON Schema, from which this page is written. Every field is always",
        "there. A number that JSON does not have is a text: inf, -inf or nan.",
    ]
    for name in [top, *sorted(name for name in records if name != top)]:
        record = records[name]
        rows = [
            (f"`{field}`", _in_words(value), _escaped(value["description"]))
            for field, value in record["properties"].items()
        ]
        title = "The file" if name == top else name
        parts += ["", f"## {title}", "", _escaped(record["description"]), "", table(("field", "is", "meaning"), rows)]
    return "\n".join(parts) + "\n"


def _in_words(value: dict[str, Any]) -> str:
    """A type as a reader calls it, with a link where it is a record."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return " or ".join(f"`{one}`" for one in value["enum"])
    if "anyOf" in value:
        texts = [one for one in value["anyOf"] if one != {"enum": ["inf", "-inf", "nan"]}]
        return " or ".join(_in_words(one) for one in texts)
    if "prefixItems" in value:
        return f"list of {len(value['prefixItems'])}: {', '.join(map(_in_words, value['prefixItems']))}"
    if value["type"] == "array":
        return f"list of {_in_words(value['items'])}"
    if value["type"] == "object":
        return f"object of {_in_words(value['additionalProperties'])}"
    return {"string": "text", "boolean": "boolean", "number": "number", "integer": "integer", "null": "null"}[
        value["type"]
    ]


def _escaped(text: str) -> str:
    """Words of a docstring as Markdown within a table."""
    return text.replace("|", "&#124;").replace("<", "&lt;")
