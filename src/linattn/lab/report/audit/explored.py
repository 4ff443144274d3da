"""What an audit kept of attention rows, and what the page's explorer is given of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linattn.lab.audit.records import EXACT, AuditRow, Header, WeightsRow
from linattn.lab.audit.weights import CELLS, LETTERS, STEPS
from linattn.lab.report._text import method_words
from linattn.planning.costs import exact_state_numbers

if TYPE_CHECKING:
    from linattn.lab.report.audit.summary import AuditSummary

_BYTES = 4


@dataclass(frozen=True)
class Explored:
    """A few attention rows of heads, by method.

    Attributes:
        queries: numbers of the tokens that attend.
        cells: how many a row has, each of neighbouring keys.
        heads: layer, of those that are audited, and head, both from 0.
        rows: a text per head, letters as audit.jsonl has them; "exact" is softmax, other names are methods with widths.
    """

    queries: tuple[int, ...]
    cells: int
    heads: tuple[tuple[int, int], ...]
    rows: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ExploredMethod:
    """One method, as the explorer shows it.

    Attributes:
        name: with its width.
        bytes: it keeps per head, of float32.
        errors: relative error of each head, mean over draws; null where it is not finite.
        rows: of each head.
    """

    name: str
    bytes: int
    errors: tuple[float | None, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Explorer:
    """What the explorer is given.

    Attributes:
        model: its name.
        letters: the letters of rows, by number.
        steps: the number of the letter of 0, and of the steps to 1.
        tokens: of the text.
        cells: of a row.
        queries: numbers of the tokens that attend.
        exact_bytes: of the exact cache per head.
        heads: each in words.
        averaging: error of averaging the values, by head.
        exact: softmax's rows of each head.
        methods: all others.
    """

    model: str
    letters: str
    steps: int
    tokens: int
    cells: int
    queries: tuple[int, ...]
    exact_bytes: int
    heads: tuple[str, ...]
    averaging: tuple[float | None, ...]
    exact: tuple[str, ...]
    methods: tuple[ExploredMethod, ...]


def explored_of(header: Header, rows: Iterable[AuditRow]) -> Explored | None:
    """Collect the rows that were kept.

    Args:
        header: of the audit.
        rows: of all kinds.

    Returns:
        Those of methods whose layers are all there; None where softmax's are not.

    Raises:
        ValueError: if rows contradict each other.
    """
    found: dict[str, dict[int, WeightsRow]] = {}
    for row in rows:
        if isinstance(row, WeightsRow):
            found.setdefault(method_words(row.map, row.features or 0), {})[row.layer] = row
    whole = {name: layers for name, layers in found.items() if set(layers) == set(range(header.num_layers))}
    if EXACT not in whole:
        return None
    first, cells = whole[EXACT], min(CELLS, header.num_tokens)
    heads = _heads(first)
    texts = {name: _texts(layers) for name, layers in whole.items()}
    queries = first[0].queries
    for name, layers in whole.items():
        sizes = {len(text) for text in texts[name]}
        if _heads(layers) != heads or len(texts[name]) != len(heads) or sizes - {len(queries) * (cells + 1)}:
            raise ValueError(f"the attention rows of {name} are not those of the heads of softmax's")
    return Explored(queries, cells, heads, texts)


def explorer(summary: AuditSummary) -> Explorer | None:
    """What the page's explorer is given; None where nothing was kept.

    Args:
        summary: of an audit.

    Returns:
        The methods that were measured to their end, in the order of the audit.
    """
    kept, header = summary.explored, summary.header
    if kept is None:
        return None
    exact = exact_state_numbers(header.num_tokens, head_dim=header.head_dim, value_dim=header.value_dim)
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
        exact_bytes=_BYTES * exact,
        heads=tuple(f"layer {header.number(layer)}, head {head}" for layer, head in kept.heads),
        averaging=tuple(_finite(summary.uniform_errors[layer][head]) for layer, head in kept.heads),
        exact=kept.rows[EXACT],
        methods=methods,
    )


def _heads(layers: Mapping[int, WeightsRow]) -> tuple[tuple[int, int], ...]:
    """Layer and head of each text."""
    return tuple((layer, head) for layer in sorted(layers) for head in layers[layer].heads)


def _texts(layers: Mapping[int, WeightsRow]) -> tuple[str, ...]:
    """The texts of all layers."""
    return tuple(text for layer in sorted(layers) for text in layers[layer].rows)


def _finite(value: float) -> float | None:
    """A number for the page."""
    return round(value, 4) if math.isfinite(value) else None
