"""Exact keys and the map's in a stream, cut anywhere; letters as in exact/__init__.py.

The stream is cut into blocks of w tokens. A query sees the keys of its own block up to itself and of the block before
exactly. As its block begins, the keys of the block before those leave the neighbourhood: the g that the rule ranks
first among them and the heavy keys so far are kept exactly, the others go into the map's sums for good. A key's mass is
its mean weight in the softmax over a query's neighbourhood, over the queries whose neighbourhood it was in: past
queries alone decide, and the same ones however the stream is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends import Backend, Call
from linattn.attention.exact.heavy import attend_by_block, schedule
from linattn.attention.exact.keys import ExactKeys, Tokens
from linattn.attention.exact.map_part import MapPart, joined
from linattn.attention.exact.neighbourhood import near
from linattn.attention.exact.rule import Exact
from linattn.attention.partial import Partial, combine
from linattn.attention.softmax import inert
from linattn.attention.sums import Sums


def attend(call: Call, backend: Backend, before: Sums, exact: ExactKeys) -> tuple[Partial, Sums, ExactKeys]:
    """Rows (B, H, G, Lq, ·) of the last tokens, Lq ≤ Lk, and the sums and the exact keys after all."""
    bound, query, key, value, bias, _ = call
    map_part, rule = MapPart(bound, backend), exact.rule
    window, scale, recent = rule.window or 0, map_part.scale, exact.recent
    if bias is not None:
        key, value = inert(key, bias), inert(value, bias)
    given = recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    tokens = recent.then(Tokens(key, value, given.expand(key.shape[:3])))
    length = tokens.key.shape[2]
    first = length - query.shape[3]
    # Rows of tokens whose queries are not asked for are filled in and dropped.
    rows = torch.nn.functional.pad(query, (0, 0, first, 0)) if first else query
    local, mass = near(rows, tokens, window, scale, is_causal=True, first=first if rule.num_heavy else None)
    mass = mass + torch.nn.functional.pad(exact.recent_mass, (0, length - recent.key.shape[2]))
    leaving = max(-(-length // window) - 2, 0) * window
    parts, left = [_rows(local, first)], tokens.cut(0, leaving)
    heavy, score = exact.heavy, exact.heavy_score
    if rule.num_heavy:
        chosen, pool = schedule(rule, _score(rule, mass, left), score), heavy.then(tokens)
        parts.append(_heavy_rows(rows, pool, chosen.heavy, first, window, scale))
        left, heavy = pool.pick(chosen.left.flatten(2)), pool.pick(chosen.heavy[:, :, -1])
        score = chosen.score.clone()
    # Without a bias the folds copy nothing.
    is_plain = bias is None and recent.bias.shape[2] == 0 and not rule.num_heavy
    distant, after = _map_rows(map_part, rows, left, first, before, window, is_plain=is_plain)
    # Copies: views would keep all keys of the call in memory.
    key, value, given, mass = (x.clone() for x in (*tokens.cut(leaving, length), mass[..., leaving:]))
    return combine(*parts, distant), after, ExactKeys(heavy, score, Tokens(key, value, given), mass, rule)


def _rows(partial: Partial, first: int) -> Partial:
    """The rows from `first` on."""
    return Partial(partial.out[:, :, :, first:], partial.log_normalizer[:, :, :, first:])


def _score(rule: Exact, mass: Tensor, leaving: Tokens) -> Tensor:
    """Scores (B, H, n) of tokens that leave, from their mean mass over the queries whose neighbourhood each was in."""
    window, count = rule.window or 0, leaving.bias.shape[2]
    places = torch.arange(count, device=mass.device) % window
    score = rule.score(mass[..., :count] / (2 * window - places), leaving.key, leaving.value)
    return score.masked_fill(leaving.bias == -torch.inf, -torch.inf)


def _heavy_rows(rows: Tensor, pool: Tokens, heavy: Tensor, first: int, window: int, scale: float) -> Partial:
    """The rows over the heavy keys (B, H, 1 + n, g) of their block."""
    number, last = first // window, -(-rows.shape[3] // window)
    # The first two blocks share the heavy keys the stream came with.
    which = torch.arange(number, last, device=rows.device).sub(1).clamp(min=0)
    begin = number * window
    part = attend_by_block(rows[:, :, :, begin:], pool, heavy[:, :, which], window, scale)
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
