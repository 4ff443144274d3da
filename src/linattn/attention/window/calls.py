"""Calls with a window, whose blocks are counted from each row's first live token; letters as in window/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from linattn.attention.backends import Backend, Call
from linattn.attention.sums import Sums
from linattn.attention.window.bidirectional import attend_bidirectional
from linattn.attention.window.causal import attend_causal
from linattn.attention.window.keys import WindowKeys
from linattn.softmax.left_padding import Streamed, attend_by_groups, turned
from linattn.softmax.partial import Partial
from linattn.softmax.row_groups import RowGroups
from linattn.softmax.tracing import has_values
from linattn.softmax.weighted import Reading

Kept = WindowKeys | RowGroups[WindowKeys]


def attend_with_window(
    call: Call, backend: Backend, window: int, before: Sums, keys: Kept | None, *, is_stream: bool
) -> tuple[Partial, Sums, Kept | None]:
    """Rows (B, H, G, Lq, ·), the sums after all keys, and those of the window, which a stream goes on from."""
    nothing = partial(WindowKeys.empty, window, call.key, call.value)
    if not call.is_causal:
        rows = turned(call, lambda each: attend_bidirectional(each, backend, window, before))
        return Reading(*rows).partial(), before, None
    if not is_stream and call.bias is not None and not has_values(call.bias):
        rows = turned(call, lambda each: attend_causal(each, backend, before, nothing())[0])
        return Reading(*rows).partial(), before, None
    attend = partial(_attend_alike, backend=backend)
    out, log, sums, after = attend_by_groups(call, before, keys, nothing, attend)
    return Reading(out, log).partial(), Sums(*sums), after


def _attend_alike(call: Call, sums: Sequence[Tensor], keys: WindowKeys, *, backend: Backend) -> Streamed[WindowKeys]:
    """Causal rows that begin at the same token, and what comes after them."""
    rows, after, later = attend_causal(call, backend, Sums(*sums), keys)
    return Streamed(*rows, after, later)
