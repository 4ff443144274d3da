"""A few attention rows of every head as short texts: what the report's explorer shows beside each other.

Letters: H query heads, n queries, L tokens, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn_lab.audit.records import WeightsRow

CELLS = 64
"""Neighbouring keys are added up to so many cells."""
NUM_QUERIES = 3
MOST_HEADS = 72
"""Heads of a model; of more, evenly spread ones."""
STEPS = 31
"""A cell's weight w in a row of scale 2⁻ˢ is kept as round(31·√(|w|·2ˢ)), with its sign: at most 0.033·2⁻ˢ off."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
"""By number: s, of 0 to 63; of cells, -31 to 31, and what is not finite."""


def explored_heads(num_heads: Sequence[int]) -> list[list[int]]:
    """The heads whose rows are kept."""
    places = [(layer, head) for layer, count in enumerate(num_heads) for head in range(count)]
    kept = min(MOST_HEADS, len(places))
    chosen = {places[number * len(places) // kept] for number in range(kept)}
    return [[head for head in range(count) if (layer, head) in chosen] for layer, count in enumerate(num_heads)]


def few_queries(count: int) -> list[int]:
    """Places of a few of the queries that are compared: a third of the way, two thirds, and the last."""
    return sorted({(count * number) // NUM_QUERIES - 1 for number in range(1, NUM_QUERIES + 1)} - {-1})


def weights_row(
    label: str, features: int | None, layer: int, heads: Sequence[int], queries: Sequence[int], weights: Tensor
) -> WeightsRow:
    """Some heads' rows.

    Args:
        label: the method's written form, or "exact".
        features: the map's width; None for "exact".
        layer: from 0, of those that are audited.
        heads: whose rows are kept.
        queries: numbers of the tokens that attend.
        weights: (H, n, L), of all heads.
    """
    rows = tuple(_written(weights[head]) for head in heads)
    return WeightsRow(label, features, layer, tuple(heads), tuple(queries), rows)


def _written(weights: Tensor) -> str:
    """(n, L) weights as n·(1 + C) letters, the first of a row for its scale, a power of 2 above its largest weight."""
    cells = torch.stack([part.sum(-1) for part in weights.tensor_split(min(CELLS, weights.shape[-1]), dim=-1)], -1)
    largest = torch.where(cells.isfinite(), cells.abs(), 0.0).amax(-1, keepdim=True)
    # A row of zeros has any scale.
    scale = -largest.clamp(2.0**-STEPS, 1).log2().ceil()
    steps = ((cells * 2**scale).clamp(-1, 1).abs().sqrt() * STEPS).round() * cells.sign() + STEPS
    numbers = torch.cat((scale, torch.where(cells.isfinite(), steps, 2 * STEPS + 1)), -1)
    return "".join(LETTERS[int(number)] for number in numbers.flatten().tolist())
