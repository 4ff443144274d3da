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
from linattn.attention.exact.neighbourhood import near
from linattn.attention.exact.rule import Exact
from linattn.attention.partial import Partial, as_partial, combine, joined, map_rows
from linattn.attention.softmax import inert
from linattn.attention.sums import Sums


def attend_causal(call: Call, backend: Backend, before: Sums, exact: ExactKeys) -> tuple[Partial, Sums, ExactKeys]:
    """Rows (B, H, G, Lq, ·) of the last tokens, Lq ≤ Lk, and the sums and the exact keys after all."""
    query, bias, rule, recent = call.query, call.bias, exact.rule, exact.recent
    window, scale = rule.window or 0, call.bound.feature_map.scale
    key, value = inert(bias, call.key, call.value)
    given = recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    tokens = recent.then(Tokens(key, value, given.expand(key.shape[:3])))
    length = tokens.key.shape[2]
    first = length - query.shape[3]
    local, mass = near(query, tokens, window, scale, is_causal=True, with_mass=rule.num_heavy > 0)
    leaving = max(-(-length // window) - 2, 0) * window
    parts, left = [local], tokens.cut(0, leaving)
    heavy, score, recent_mass = exact.heavy, exact.heavy_score, exact.recent_mass
    if mass is not None:
        mass = mass + torch.nn.functional.pad(recent_mass, (0, length - recent_mass.shape[2]))
        chosen, pool = schedule(rule, _score(rule, mass, left), score), heavy.then(tokens)
        parts.append(_heavy_rows(query, pool, chosen.heavy, first, window, scale))
        left, heavy = pool.pick(chosen.left.flatten(2)), pool.pick(chosen.heavy[:, :, -1])
        score, recent_mass = chosen.score.clone(), mass[..., leaving:].clone()
    else:
        recent_mass = recent_mass.new_zeros(*key.shape[:2], length - leaving)
    # Without a bias the folds copy nothing.
    is_plain = bias is None and recent.bias.shape[2] == 0 and not rule.num_heavy
    rest = call._replace(key=left.key, value=left.value, bias=None if is_plain else left.bias)
    distant, after = _map_rows(rest, backend, first, before, window)
    if leaving or not 0 < recent.bias.shape[2] < length:
        # Copies: views would keep all keys of the call in memory.
        tokens = Tokens(*(x.clone() for x in tokens.cut(leaving, length)))
    return combine(*parts, distant), after, ExactKeys(heavy, score, tokens, recent_mass, rule)


def _score(rule: Exact, mass: Tensor, leaving: Tokens) -> Tensor:
    """Scores (B, H, n) of tokens that leave, from their mean mass over the queries whose neighbourhood each was in."""
    window, count = rule.window or 0, leaving.bias.shape[2]
    places = torch.arange(count, device=mass.device) % window
    score = rule.score(mass[..., :count] / (2 * window - places), leaving.key, leaving.value)
    return score.masked_fill(leaving.bias == -torch.inf, -torch.inf)


def _heavy_rows(query: Tensor, pool: Tokens, heavy: Tensor, first: int, window: int, scale: float) -> Partial:
    """The rows from token `first` on over the heavy keys (B, H, 1 + n, g) of their block."""
    last = -(-(first + query.shape[3]) // window)
    # The first two blocks share the heavy keys the stream came with.
    which = torch.arange(first // window, last, device=query.device).sub(1).clamp(min=0)
    return attend_by_block(query, pool, heavy[:, :, which], first, window, scale)


def _map_rows(call: Call, backend: Backend, first: int, before: Sums, window: int) -> tuple[Partial, Sums]:
    """The rows from token `first` on over the map's keys: the state's, and the call's, which are left to it as blocks
    begin, w at a time.
    """
    count, parts, state = call.key.shape[2], [], before

    def rows(start: int, stop: int) -> Tensor:
        return call.query[:, :, :, max(start - first, 0) : max(stop - first, 0)]

    def read(start: int, stop: int) -> Partial:
        some = call._replace(query=rows(start, stop))
        return as_partial(some, backend.read(some, state))

    length = first + call.query.shape[3]
    if first < 2 * window or count == 0:
        parts.append(read(first, min(2 * window, length)))
    if count:
        # The third block sees the keys left first, the last one all of them; between, keys lie a span behind.
        begin = min(max(first // window * window, 2 * window), count + window)
        state = backend.absorb(call.with_keys(slice(begin - window)), before)
        if begin < count + window:
            # Rows of tokens whose queries are not asked for are filled in and dropped.
            unasked = max(first - begin, 0)
            query = torch.nn.functional.pad(rows(begin, count + window), (0, 0, unasked, 0))
            middle = call.with_keys(slice(begin - window, None))._replace(query=query)
            part, state = map_rows(middle, backend, state, span=window)
            parts.append(_rows(part, unasked))
        parts.append(read(count + window, length))
    return joined(parts), state


def _rows(partial: Partial, first: int) -> Partial:
    """The rows from `first` on."""
    return Partial(partial.out[:, :, :, first:], partial.log_normalizer[:, :, :, first:])
