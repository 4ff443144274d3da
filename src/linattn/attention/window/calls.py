"""Calls with a window: every key in view, or a stream cut anywhere; letters as in window/__init__.py.

A stream is cut into blocks of w tokens, counted from each row's first live token. A query sees the keys of its own
block up to itself and of the block before exactly. As its block begins, the keys of the block before those leave the
neighbourhood and go into the map's sums for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from linattn.attention.backends import Backend, Call
from linattn.attention.backends.backend import as_partial, map_rows
from linattn.attention.sums import Sums
from linattn.attention.window.keys import Kept, WindowKeys
from linattn.attention.window.neighbourhood import near
from linattn.softmax.attention import Reading, inert
from linattn.softmax.partial import Partial, combine, joined
from linattn.softmax.row_groups import Streamed, attend_by_groups, turned
from linattn.softmax.tokens import Tokens

# Tokens turned round at once where later keys are folded in from the end.
_SEGMENT = 4096


def attend_around(call: Call, backend: Backend, window: int, others: tuple[Sums, Sums]) -> list[Partial]:
    """The parts of rows with a window: near keys exactly, all others, two blocks away or more, by the map."""
    before, after = others
    local, call = near(call._replace(is_causal=False), backend, window), call._replace(is_causal=True)
    return [local, _earlier_blocks(call, backend, before, window), _later_blocks(call, backend, after, window)]


def _earlier_blocks(call: Call, backend: Backend, before: Sums, window: int) -> Partial:
    """Rows over the keys two blocks or more before their own, and over those of the sums."""
    head, last = _over(call, slice(window), backend, before), max(call.query.shape[3] - window, 0)
    if last == 0:
        return head
    # A block later, the keys of earlier spans are those of two blocks or more before.
    rows = call.with_keys(slice(last))._replace(query=call.query[..., window:, :])
    return joined([head, map_rows(rows, backend, before, span=window)[0]])


def _later_blocks(call: Call, backend: Backend, after: Sums, window: int) -> Partial:
    """Rows over the keys two blocks or more after their own, and over those of the sums: from the end, by segments."""
    query, length = call.query, call.query.shape[3]
    padded = -(-length // window) * window
    size, parts, state = max(_SEGMENT // window, 1) * window, [], after
    for start in range(0, padded - window, size):
        stop = min(start + size, padded - window)
        rows = query[..., padded - window - stop : padded - window - start, :].flip(3)
        end = min(padded - start, length)
        short, keys = padded - start - end, call.with_keys(slice(padded - stop, end))
        later = keys.bias
        if short and later is None:
            later = after.z.new_zeros(rows.shape[0], 1, keys.key.shape[2])
        k, v = (torch.nn.functional.pad(x.flip(2), (0, 0, short, 0)) for x in (keys.key, keys.value))
        if later is not None:
            later = torch.nn.functional.pad(later.flip(-1), (short, 0), value=-torch.inf)
        turned = call._replace(query=rows, key=k, value=v, bias=later)
        part, state = map_rows(turned, backend, state, span=window)
        parts.append(Partial(part.out.flip(3), part.log_normalizer.flip(3)))
    return joined([*reversed(parts), _over(call, slice(max(padded - window, 0), None), backend, after)])


def _over(call: Call, part: slice, backend: Backend, sums: Sums) -> Partial:
    """The partial result of some queries over sums alone."""
    rows = call._replace(query=call.query[..., part, :])
    return as_partial(rows, backend.read(rows, sums))


def attend_causal(call: Call, backend: Backend, before: Sums, keys: WindowKeys) -> tuple[Partial, Sums, WindowKeys]:
    """Rows (B, H, G, Lq, ·) of the last tokens, Lq ≤ Lk, and the sums and the exact keys after all."""
    query, bias, recent, window = call.query, call.bias, keys.recent, keys.width
    key, value = inert(bias, call.key, call.value)
    biases = recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    held = keys.then(Tokens(key, value, biases.expand(key.shape[:3])))
    tokens = held.recent
    length = tokens.key.shape[2]
    leaving = max(-(-length // window) - 2, 0) * window
    # Without a bias the folds copy nothing.
    is_plain = bias is None and recent.bias.shape[2] == 0
    seen = call._replace(key=tokens.key, value=tokens.value, bias=None if is_plain else tokens.bias)
    local, left = near(seen, backend, window), tokens.cut(0, leaving)
    rest = call._replace(key=left.key, value=left.value, bias=None if is_plain else left.bias)
    distant, after = _map_rows(rest, backend, length - query.shape[3], before, window)
    return combine(local, distant), after, held.without(leaving)


def _map_rows(call: Call, backend: Backend, first: int, before: Sums, window: int) -> tuple[Partial, Sums]:
    """The rows from token `first` on over the state's keys and the call's, which the map gets as blocks begin."""
    count, parts, state = call.key.shape[2], [], before

    def rows(start: int, stop: int) -> slice:
        return slice(max(start - first, 0), max(stop - first, 0))

    length = first + call.query.shape[3]
    if first < 2 * window or count == 0:
        parts.append(_over(call, rows(first, min(2 * window, length)), backend, state))
    if count:
        # The third block sees the keys left first, the last one all of them; between, keys lie a span behind.
        begin = min(max(first // window * window, 2 * window), count + window)
        state = backend.absorb(call.with_keys(slice(begin - window)), before)
        if begin < count + window:
            # Rows of tokens whose queries are not asked for are filled in and dropped.
            unasked = max(first - begin, 0)
            query = torch.nn.functional.pad(call.query[..., rows(begin, count + window), :], (0, 0, unasked, 0))
            middle = call.with_keys(slice(begin - window, None))._replace(query=query)
            part, state = map_rows(middle, backend, state, span=window)
            parts.append(Partial(part.out[:, :, :, unasked:], part.log_normalizer[:, :, :, unasked:]))
        parts.append(_over(call, rows(count + window, length), backend, state))
    return joined(parts), state


def attend_with_window(
    call: Call, backend: Backend, window: int, before: Sums, keys: Kept | None, *, is_stream: bool
) -> tuple[Partial, Sums, Kept | None]:
    """Rows (B, H, G, Lq, ·), the sums after all keys, and those of the window, which a stream goes on from."""
    nothing = partial(WindowKeys.empty, window, call.key, call.value)

    def attend_bidirectional(each: Call) -> Partial:
        key, value = inert(each.bias, each.key, each.value)
        return combine(*attend_around(each._replace(key=key, value=value), backend, window, (before, before)))

    def attend_alike(each: Call, sums: Sequence[Tensor], keys: WindowKeys) -> Streamed[WindowKeys]:
        rows, after, later = attend_causal(each, backend, Sums(*sums), keys)
        return Streamed(*rows, after, later)

    if not call.is_causal:
        return Reading(*turned(call, attend_bidirectional)).partial(), before, None
    out, log, sums, after = attend_by_groups(call, before, keys, nothing, attend_alike, turns=not is_stream)
    return Reading(out, log).partial(), Sums(*sums), after
