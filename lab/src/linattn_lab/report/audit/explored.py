"""What an audit kept of attention rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from linattn_lab.audit.records import EXACT, AuditRow, Header, WeightsRow
from linattn_lab.audit.weights import CELLS
from linattn_lab.report._text import method_words


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


def explored_of(header: Header, rows: Iterable[AuditRow]) -> Explored | None:
    """Collect the rows that were kept."""
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


def _heads(layers: Mapping[int, WeightsRow]) -> tuple[tuple[int, int], ...]:
    """Layer and head of each text."""
    return tuple((layer, head) for layer in sorted(layers) for head in layers[layer].heads)


def _texts(layers: Mapping[int, WeightsRow]) -> tuple[str, ...]:
    """The texts of all layers."""
    return tuple(text for layer in sorted(layers) for text in layers[layer].rows)
