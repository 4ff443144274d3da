"""Exact keys and the map's, every key in view; letters as in window/__init__.py."""

from __future__ import annotations

import torch

from linattn.attention.backends import Backend, Call
from linattn.attention.map_rows import as_partial, map_rows
from linattn.attention.sums import Sums
from linattn.attention.window.neighbourhood import near
from linattn.softmax.attention import inert
from linattn.softmax.partial import Partial, combine, joined

# Tokens turned round at once where later keys are folded in from the end.
_SEGMENT = 4096


def attend_bidirectional(call: Call, backend: Backend, window: int, nothing: Sums) -> Partial:
    """Rows (B, H, G, Lq, ·): neighbouring blocks exactly, keys before and after them by the map, as two parts."""
    key, value = inert(call.bias, call.key, call.value)
    return combine(*attend_around(call._replace(key=key, value=value), backend, window, (nothing, nothing)))


def attend_around(call: Call, backend: Backend, window: int, others: tuple[Sums, Sums]) -> list[Partial]:
    """The parts of rows (B, H, G, L, ·) with a window: near keys exactly, all others by the map; masked ones are inert.

    Where the call is a part of a sequence, the others are the keys before and after it; they must be two blocks or more
    from every row that is wanted.
    """
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
        short = padded - start - end
        keys = call.with_keys(slice(padded - stop, end))
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
