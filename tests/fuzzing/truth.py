"""The parts of one call of attention: which keys the map takes, and which are exact.

Letters: B batch, H key/value heads, G query heads of each, N queries, M keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing import who
from fuzzing.oracle import Part, Rows, attend
from fuzzing.weights import Weigher


class Tokens(NamedTuple):
    """A call's tokens in float64, masked ones 0.

    Attributes:
        query: (B, H·G, N, D).
        key: (B, H, M, D).
        value: (B, H, M, Dv).
        live: (B, M), False for masked keys.
        places: (N,): causally, the place of the last key that a query sees.
        bias: (B, H or 1, M) in float64, the logarithm of a factor on each key's weight, -inf for a masked key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    live: Tensor
    places: Tensor
    bias: Tensor | None = None

    @property
    def grouped(self) -> Tensor:
        """Queries (B, H, G, N, D)."""
        return self.query.unflatten(1, (self.key.shape[1], -1))


class Parts(NamedTuple):
    """Parts that together hold all keys."""

    parts: list[Part]

    def rows(self, tokens: Tokens, **options: object) -> Rows:
        """The truth."""
        return attend(self.parts, tokens.query, tokens.key, tokens.value, **options)


def parts_of(weigher: Weigher, tokens: Tokens, window: int | None, *, is_causal: bool) -> Parts:
    """The parts of one call, or of a whole stream."""
    grouped, live = tokens.grouped, tokens.live[:, None, None, None]
    num_queries, num_keys = grouped.shape[3], tokens.key.shape[2]
    sight = who.causal(tokens.places, num_keys) if is_causal else torch.ones(num_queries, num_keys, dtype=torch.bool)
    bias = None if tokens.bias is None else tokens.bias[:, :, None, None]
    if window is None:
        seen = sight & live
        return Parts([Part(weigher, seen if bias is None else seen & (bias > -torch.inf), bias)])
    assert weigher.map is not None
    exact = Weigher(None, weigher.rounding, weigher.map.scale, weigher.map)
    near = who.near(tokens.places, tokens.live, window, is_causal=is_causal)
    seen = (sight & live).expand(*tokens.key.shape[:2], 1, -1, -1)
    parts, rest = [Part(exact, near & seen, bias)], ~near & seen
    if is_causal:
        return Parts([*parts, Part(weigher, rest, bias)])
    # The map's keys before and after the neighbourhood are two parts.
    own, other = (who.turned(x, tokens.live, is_causal=False) for x in (tokens.places, torch.arange(num_keys)))
    before = (other.unsqueeze(-2) <= own.unsqueeze(-1))[:, None, None]
    return Parts([*parts, *(Part(weigher, rest & side, bias) for side in (before, ~before))])
