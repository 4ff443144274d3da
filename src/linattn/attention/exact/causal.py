"""Exact keys and the map's in a stream, cut anywhere; letters as in exact/__init__.py.

The stream is cut into blocks of w tokens. A query sees the keys of its own block up to itself and of the block before
exactly. As its block begins, the keys of the block before those leave the neighbourhood: the g of the largest score
among them and the heavy keys so far are kept exactly, the others go into the map's sums for good. A key's score is its
mean weight in the softmax over a query's neighbourhood, over the queries whose neighbourhood it was in: past queries
alone decide, and the same ones however the stream is cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.heavy import Schedule, attend_by_block, picked, schedule
from linattn.attention.exact.keys import ExactKeys
from linattn.attention.exact.map_part import MapPart, joined
from linattn.attention.exact.neighbourhood import near
from linattn.attention.partial import Partial, combine
from linattn.attention.softmax import inert
from linattn.attention.sums import Sums


class Tokens(NamedTuple):
    """Keys (B, H, n, D), values (B, H, n, Dv), and their biases (B, H, n), -inf for those that are not there."""

    key: Tensor
    value: Tensor
    bias: Tensor

    def then(self, *other: Tensor) -> Tokens:
        """These and then others, which are not copied where these are none."""
        pairs = zip(self, other, strict=True)
        key, value, bias = other if self.bias.shape[2] == 0 else (torch.cat(pair, 2) for pair in pairs)
        return Tokens(key, value, bias)

    def pick(self, index: Tensor) -> Tokens:
        """Those of the numbers (B, H, n)."""
        return Tokens(picked(self.key, index), picked(self.value, index), self.bias.gather(-1, index))

    def cut(self, start: int, stop: int) -> Tokens:
        """Consecutive ones."""
        return Tokens(self.key[:, :, start:stop], self.value[:, :, start:stop], self.bias[:, :, start:stop])


class Stream(NamedTuple):
    """What causal attention with exact keys returns."""

    partial: Partial  # (B, H, G, Lq, ·)
    sums: Sums
    exact: ExactKeys


def attend(
    map_part: MapPart,
    query: Tensor,  # (B, H, G, Lq, D), Lq ≤ Lk: the last tokens'
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,  # (B, H, Lk, Dv)
    bias: Tensor | None,  # (B, H or 1, Lk)
    before: Sums,
    exact: ExactKeys,
) -> Stream:
    """Rows of the queries, and the state after the keys."""
    window, scale = exact.window, map_part.scale
    if bias is not None:
        key, value = inert(key, bias), inert(value, bias)
    rise = exact.recent_bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    recent = Tokens(exact.recent_key, exact.recent_value, exact.recent_bias)
    tokens = recent.then(key, value, rise.expand(*key.shape[:3]))
    length = tokens.key.shape[2]
    first = length - query.shape[3]
    # Rows of tokens whose queries are not asked for are filled in and dropped.
    rows = torch.nn.functional.pad(query, (0, 0, first, 0)) if first else query
    local = near(rows, *tokens, window=window, scale=scale, is_causal=True, first=first if exact.num_heavy else None)
    mass = local.mass + torch.nn.functional.pad(exact.recent_mass, (0, length - recent.key.shape[2]))
    leaving = max(-(-length // window) - 2, 0) * window
    parts, left = [_rows(local.partial, first)], tokens.cut(0, leaving)
    heavy = (exact.heavy_key, exact.heavy_value, exact.heavy_bias, exact.heavy_score)
    if exact.num_heavy:
        chosen = schedule(_score(mass, tokens.bias, leaving, window), exact.heavy_score, window)
        pool = Tokens(exact.heavy_key, exact.heavy_value, exact.heavy_bias).then(*tokens)
        parts.append(_heavy_rows(rows, pool, chosen, first, window, scale))
        left = pool.pick(chosen.left.flatten(2))
        last = pool.pick(chosen.heavy[:, :, -1])
        heavy = (last.key, last.value, last.bias, chosen.score.clone())
    # Without a bias the folds copy nothing.
    is_plain = bias is None and exact.recent_bias.shape[2] == 0 and not exact.num_heavy
    distant, after = _map_rows(map_part, rows, left, first, before, window, is_plain=is_plain)
    # Copies: views would keep all keys of the call in memory.
    key, value, rise, mass = (x.clone() for x in (*tokens.cut(leaving, length), mass[..., leaving:]))
    return Stream(combine(*parts, distant), after, ExactKeys(*heavy, key, value, rise, mass, window))


def _rows(partial: Partial, first: int) -> Partial:
    """The rows from `first` on."""
    return Partial(partial.out[:, :, :, first:], partial.log_normalizer[:, :, :, first:])


def _score(mass: Tensor, bias: Tensor, count: int, window: int) -> Tensor:
    """Mean mass of the tokens that leave, over the queries whose neighbourhood each was in: (B, H, n)."""
    places = torch.arange(count, device=mass.device) % window
    score = mass[..., :count] / (2 * window - places)
    return score.masked_fill(bias[..., :count] == -torch.inf, -torch.inf)


def _heavy_rows(rows: Tensor, pool: Tokens, chosen: Schedule, first: int, window: int, scale: float) -> Partial:
    """The rows over the heavy keys of their block."""
    number, last = first // window, -(-rows.shape[3] // window)
    # The first two blocks share the heavy keys the stream came with.
    which = torch.arange(number, last, device=rows.device).sub(1).clamp(min=0)
    begin = number * window
    part = attend_by_block(rows[:, :, :, begin:], *pool, chosen.heavy[:, :, which], window, scale)
    return _rows(part, first - begin)


def _map_rows(
    map_part: MapPart, rows: Tensor, left: Tokens, first: int, before: Sums, window: int, *, is_plain: bool
) -> tuple[Partial, Sums]:
    """The rows over the map's keys: the state's, and those left to it as blocks begin, w at a time."""
    count, parts, state = left.bias.shape[2], [], before
    if first < 2 * window or count == 0:
        parts.append(map_part.read(rows[:, :, :, first : 2 * window], before))
    if count:
        # The third block sees the keys left first, the last one all of them; between, keys lie a span behind.
        key, value, bias = left
        head, tail = (None if is_plain else bias[..., part] for part in (slice(window), slice(window, None)))
        state = map_part.absorb(key[:, :, :window], value[:, :, :window], head, before)
        middle = rows[:, :, :, 2 * window : count + window]
        part, state = map_part.earlier_spans(middle, key[:, :, window:], value[:, :, window:], tail, state, window)
        parts.append(_rows(part, max(first - 2 * window, 0)))
        parts.append(map_part.read(rows[:, :, :, max(first, count + window) :], state))
    return joined(parts), state
