"""The parts of one call of attention: which keys the map takes, which are exact, and where rounding decides.

Letters: B batch, H key/value heads, G query heads of each, N queries, M keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import linattn
from fuzzing import who
from fuzzing.oracle import Part, Rows, attend, without
from fuzzing.weights import Weigher


class Exactly(NamedTuple):
    """An exact part: window or None, and how many heavy keys."""

    window: int | None = None
    num_heavy: int = 0

    @property
    def option(self) -> linattn.Exact | None:
        """As the op takes it."""
        return linattn.Exact(*self) if self else None

    def __bool__(self) -> bool:
        return self.window is not None or self.num_heavy > 0


class Tokens(NamedTuple):
    """A call's tokens in float64, masked ones 0.

    Attributes:
        query: (B, H·G, N, D).
        key: (B, H, M, D).
        value: (B, H, M, Dv).
        live: (B, M), False for masked keys.
        places: (N,): causally, the place of the last key that a query sees.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    live: Tensor
    places: Tensor

    @property
    def grouped(self) -> Tensor:
        """Queries (B, H, G, N, D)."""
        return self.query.unflatten(1, (self.key.shape[1], -1))


class Parts(NamedTuple):
    """Parts that together hold all keys, and the queries (B, H·G, N) whose parts rounding chose."""

    parts: list[Part]
    unclear: Tensor

    def rows(self, tokens: Tokens, **options: object) -> Rows:
        """The truth."""
        return without(attend(self.parts, tokens.query, tokens.key, tokens.value, **options), self.unclear)


def parts_of(weigher: Weigher, tokens: Tokens, exactly: Exactly, *, is_causal: bool) -> Parts:
    """The parts of one call, or of a whole stream."""
    grouped, live = tokens.grouped, tokens.live[:, None, None, None]
    num_queries, num_keys = grouped.shape[3], tokens.key.shape[2]
    sight = who.causal(tokens.places, num_keys) if is_causal else torch.ones(num_queries, num_keys, dtype=torch.bool)
    unclear = torch.zeros(tokens.query.shape[:3], dtype=torch.bool)
    if not exactly:
        return Parts([Part(weigher, sight & live)], unclear)
    assert weigher.map is not None
    scale, groups = weigher.map.scale, grouped.shape[2]
    exact = torch.zeros_like(sight).expand(*tokens.key.shape[:2], 1, -1, -1)
    if exactly.window is not None:
        exact = exact | who.near(tokens.places, num_keys, exactly.window, is_causal=is_causal)
    if exactly.num_heavy and is_causal:
        assert exactly.window is not None
        arguments = (tokens.live, tokens.places, exactly.window, exactly.num_heavy, scale, weigher.rounding)
        heavy = who.heavy_so_far(grouped.detach(), tokens.key.detach(), *arguments)
        exact, unclear = exact | heavy.seen.unsqueeze(2), heavy.unclear.repeat_interleave(groups, 1)
    elif exactly.num_heavy:
        chosen, doubtful = _heavy_everywhere(weigher, tokens, exactly.num_heavy)
        exact = exact | chosen[:, :, None, None]
        unclear = unclear | doubtful.repeat_interleave(groups, 1).unsqueeze(-1)
    softmax = Weigher(None, weigher.rounding, scale)
    seen = sight & live
    parts = [Part(softmax, exact & seen)]
    rest = ~exact & seen
    if exactly.window is not None and not is_causal:
        # The map's keys before and after the neighbourhood are two parts.
        before = who.causal(tokens.places, num_keys)
        parts += [Part(weigher, rest & before), Part(weigher, rest & ~before)]
    else:
        parts.append(Part(weigher, rest))
    return Parts(parts, unclear)


def _heavy_everywhere(weigher: Weigher, tokens: Tokens, count: int) -> tuple[Tensor, Tensor]:
    """The keys (B, H, M) of the largest column mass in the map's own matrix; where rounding decides (B, H)."""
    with torch.no_grad():
        visible = tokens.live[:, None, None, None].expand(-1, 1, 1, tokens.query.shape[2], -1)
        whole = attend([Part(weigher, visible)], tokens.query, tokens.key, tokens.value)
    shape = (tokens.key.shape[1], -1)
    mass, error = (x.unflatten(1, shape).sum((2, 3)) for x in (whole.weights, whole.weights_error))
    chosen, unclear = who.heaviest(mass, 4 * error, tokens.live, count)
    lost = ~whole.known.unflatten(1, shape).flatten(2).all(-1)
    return chosen, unclear | lost
