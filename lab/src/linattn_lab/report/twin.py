"""The figures of a page as JSON: what report.json holds, and its schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from linattn_lab.records.schema import json_schema
from linattn_lab.report._text import Point
from linattn_lab.report.audit.summary import AuditSummary
from linattn_lab.report.bench.summary import BenchSummary
from linattn_lab.report.claims.summary import ClaimsSummary
from linattn_lab.report.memory.summary import MemorySummary

VERSION: Final = 1


@dataclass(frozen=True)
class Twin:
    """A page's figures; numbers that JSON does not have are the texts "inf", "-inf" and "nan".

    Attributes:
        kind: what the file is.
        version: of this form; another one has other fields.
        answers: the questions at the top of the page, answered.
        audit: errors of methods on a model's heads; null where audit.jsonl is not there, as the next three.
        claims: claims about linear attention, and which hold.
        bench: speed of linear attention, by context length.
        memory: what a language model loses by a bounded KV cache.
        unread: files that could not be read, with what is wrong with them.
    """

    kind: Literal["linattn report"]
    version: Literal[1]
    answers: tuple[Point, ...]
    audit: AuditSummary | None
    claims: ClaimsSummary | None
    bench: BenchSummary | None
    memory: MemorySummary | None
    unread: tuple[Point, ...]


def report_schema() -> dict[str, Any]:
    """The JSON Schema of report.json, every field in words.

    Returns:
        The schema, of draft 2020-12.

    Example:
        >>> report_schema()["$defs"]["Crossover"]["properties"]["always"]
        {'description': 'whether it is faster at every length.', 'type': 'boolean'}
    """
    return json_schema(Twin)
