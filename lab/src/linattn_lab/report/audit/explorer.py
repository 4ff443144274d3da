"""What the explorer of attention rows is given: as a part of the report, and as a page of its own for the site."""

from __future__ import annotations

import math
from dataclasses import dataclass

from linattn.records.json_files import to_json
from linattn_lab.audit.records import EXACT
from linattn_lab.audit.weights import LETTERS, STEPS
from linattn_lab.report._render import rendered
from linattn_lab.report.audit.summary import AuditSummary

_BYTES = 4


@dataclass(frozen=True)
class ExploredMethod:
    """One method, as the explorer shows it."""

    name: str  # with its width
    bytes: int  # it keeps per head, of float32
    errors: tuple[float | None, ...]  # relative error of each head, mean over draws; null where it is not finite
    rows: tuple[str, ...]  # of each head


@dataclass(frozen=True)
class Explorer:
    """What the explorer is given."""

    model: str  # its name
    letters: str  # the letters of rows, by number
    steps: int  # the number of the letter of 0, and of the steps to 1
    tokens: int  # of the text
    cells: int  # of a row
    queries: tuple[int, ...]  # numbers of the tokens that attend
    exact_bytes: int  # of the exact cache per head
    heads: tuple[str, ...]  # each in words
    averaging: tuple[float | None, ...]  # error of uniform attention, by head
    exact: tuple[str, ...]  # softmax's rows of each head
    methods: tuple[ExploredMethod, ...]  # all others


def explorer(summary: AuditSummary) -> Explorer | None:
    """What the page's explorer is given; None where nothing was kept."""
    kept, header = summary.explored, summary.header
    if kept is None:
        return None
    methods = tuple(
        ExploredMethod(
            name=line.words,
            bytes=_BYTES * line.state_numbers,
            errors=tuple(
                _finite(line.head_ratios[layer][head] * summary.uniform_errors[layer][head])
                for layer, head in kept.heads
            ),
            rows=kept.rows[line.words],
        )
        for line in summary.lines
        if line.words in kept.rows
    )
    return Explorer(
        model=header.model,
        letters=LETTERS,
        steps=STEPS,
        tokens=header.num_tokens,
        cells=kept.cells,
        queries=kept.queries,
        exact_bytes=_BYTES * summary.exact_numbers,
        heads=tuple(f"layer {header.number(layer)}, head {head}" for layer, head in kept.heads),
        averaging=tuple(_finite(summary.uniform_errors[layer][head]) for layer, head in kept.heads),
        exact=kept.rows[EXACT],
        methods=methods,
    )


def explorer_page(found: Explorer) -> str:
    """What an audit kept of attention rows as one file, scripts and styles inside; it asks for no other."""
    return rendered("explorer_page.html.j2", {}, {"explorer": to_json(found)})


def _finite(value: float) -> float | None:
    """A number for the page."""
    return round(value, 4) if math.isfinite(value) else None
