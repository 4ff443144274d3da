"""Exact keys and the map's, every key in view; letters as in exact/__init__.py."""

from __future__ import annotations

import torch

from linattn.attention.backends import Backend, Call
from linattn.attention.exact.heavy import attend_to_all
from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.map_part import MapPart
from linattn.attention.exact.neighbourhood import near
from linattn.attention.exact.rule import Exact
from linattn.attention.partial import Partial, combine
from linattn.attention.softmax import inert
from linattn.attention.sums import Sums


def attend(call: Call, backend: Backend, exact: Exact, nothing: Sums) -> Partial:
    """Rows (B, H, G, Lq, ·): neighbouring blocks and heavy keys exactly, what comes before and after by the map.

    With a window the map's keys are two parts, before and after the neighbourhood.
    """
    bound, query, key, value, bias, _ = call
    map_part, window, rest, parts = MapPart(bound, backend), exact.window, bias, []
    if bias is not None:
        key, value = inert(key, bias), inert(value, bias)
    every = nothing.z.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    if exact.num_heavy and key.shape[2]:
        every = every.expand(key.shape[:3])
        score = exact.score(backend.column_mass(bound, query, key, bias), key, value)
        score = score.masked_fill(every == -torch.inf, -torch.inf)
        chosen = exact.rank(score, min(exact.num_heavy, key.shape[2]))
        parts.append(attend_to_all(query, Tokens(key, value, every).pick(chosen), map_part.scale))
        every = rest = every.scatter(-1, chosen, -torch.inf)
    if window is None:
        return combine(*parts, map_part.all_keys(query, key, value, rest, nothing))
    parts.append(near(query, Tokens(key, value, every), window, map_part.scale, is_causal=False)[0])
    parts.append(map_part.earlier_blocks(query, key, value, rest, nothing, window))
    parts.append(map_part.later_blocks(query, key, value, rest, nothing, window))
    return combine(*parts)
