"""Exact keys and the map's in a stream, cut anywhere; letters as in window/__init__.py.

The stream is cut into blocks of w tokens. A query sees the keys of its own block up to itself and of the block before
exactly. As its block begins, the keys of the block before those leave the neighbourhood and go into the map's sums for
good.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends import Backend, Call
from linattn.attention.map_rows import as_partial, map_rows
from linattn.attention.sums import Sums
from linattn.attention.window.keys import WindowKeys
from linattn.attention.window.neighbourhood import near
from linattn.softmax.attention import inert
from linattn.softmax.partial import Partial, combine, joined
from linattn.softmax.tokens import Tokens


def attend_causal(call: Call, backend: Backend, before: Sums, keys: WindowKeys) -> tuple[Partial, Sums, WindowKeys]:
    """Rows (B, H, G, Lq, ·) of the last tokens, Lq ≤ Lk, and the sums and the exact keys after all."""
    query, bias, recent, window = call.query, call.bias, keys.recent, keys.width
    key, value = inert(bias, call.key, call.value)
    biases = recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    tokens = recent.then(Tokens(key, value, biases.expand(key.shape[:3])))
    length = tokens.key.shape[2]
    leaving = max(-(-length // window) - 2, 0) * window
    # Without a bias the folds copy nothing.
    is_plain = bias is None and recent.bias.shape[2] == 0
    seen = call._replace(key=tokens.key, value=tokens.value, bias=None if is_plain else tokens.bias)
    local, left = near(seen, backend, window), tokens.cut(0, leaving)
    rest = call._replace(key=left.key, value=left.value, bias=None if is_plain else left.bias)
    distant, after = _map_rows(rest, backend, length - query.shape[3], before, window)
    if leaving or not 0 < recent.bias.shape[2] < length:
        # Copies: views would keep all keys of the call in memory.
        tokens = Tokens(*(x.clone() for x in tokens.cut(leaving, length)))
    return combine(local, distant), after, WindowKeys(tokens, window)


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
