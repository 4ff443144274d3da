"""Streams of each row's live tokens alone, wherever masked ones stand; letters as in kv_cache/__init__.py.

Masked tokens before a row's first live one are cut off by `attend_by_groups`. Later ones would take the room of others:
a call with such is cut into runs of live tokens, which go on with the stream, and of masked ones, which only read it.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.kv_cache.keys import MergedKeys
from linattn.softmax.attention import Reading
from linattn.softmax.row_groups import RowGroups, Streamed, attend_by_groups, has_begun, in_order, rows_from, rows_of
from linattn.softmax.tracing import has_values

Kept = MergedKeys | RowGroups[MergedKeys]
Attend = Callable[[Any, Sequence[Tensor], MergedKeys], Streamed[MergedKeys]]
Read = Callable[[Any, MergedKeys], Reading]


def attend_live_tokens(
    call: Any, keys: Kept | None, nothing: Callable[[], MergedKeys], attend: Attend, read: Read, *, is_stream: bool
) -> Streamed[MergedKeys]:
    """`attend_by_groups` as if no row had masked tokens; in graphs, where a mask has no values yet, they take room."""
    if call.bias is None or not has_values(call.bias) or not bool((dead := call.bias == -torch.inf).any()):
        turns = not is_stream and call.query.shape[3] == call.key.shape[2]  # else queries nobody asks for are sampled
        return attend_by_groups(call, (), keys, nothing, attend, turns=turns)
    live, before = ~dead.all(1), nothing() if keys is None else keys
    if not isinstance(before, RowGroups):
        before = RowGroups((tuple(range(len(live))),), (before,))
    if not _has_holes(live, before, is_stream=is_stream):
        return attend_by_groups(call, (), keys, nothing, attend)
    patterns, parts = live.tolist(), []
    for rows, held in zip(before.rows, before.keys, strict=True):
        alike: dict[tuple[bool, ...], list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(tuple(patterns[row]), []).append(place)
        for pattern, places in alike.items():
            members = tuple(rows[place] for place in places)
            parts.append(
                (members, *_by_runs(rows_from(call, members, 0), pattern, rows_of(held, places), attend, read))
            )
    each, readings, after = zip(*parts, strict=True)
    outs, logs = zip(*readings, strict=True)
    log = None if logs[0] is None else in_order(each, logs)
    return Streamed(in_order(each, outs), log, (), RowGroups.joined(list(zip(each, after, strict=True))))


def _has_holes(live: Tensor, before: RowGroups[MergedKeys], *, is_stream: bool) -> bool:
    """Whether masked tokens (B, L) come after a live one, be it of an earlier call; in no stream before another."""
    begun = live.new_zeros(len(live), 1)
    for rows, keys in zip(before.rows, before.keys, strict=True):
        begun[list(rows)] = has_begun(keys)
    holes = ~live & ((live.cumsum(-1) > 0) | begun)
    return bool((holes if is_stream else holes & (live.flip(-1).cumsum(-1).flip(-1) > 0)).any())


def _by_runs(
    call: Any, live: Sequence[bool], keys: MergedKeys, attend: Attend, read: Read
) -> tuple[Reading, MergedKeys]:
    """Outputs of rows whose live tokens are the same ones, and what is kept after them."""
    first, stop, readings = len(live) - call.query.shape[3], 0, []
    for is_live, run in itertools.groupby(live):
        start, stop = stop, stop + len(list(run))
        query = call.query[:, :, :, max(start - first, 0) : max(stop - first, 0)]
        if is_live:
            key, value, bias = call.key[:, :, start:stop], call.value[:, :, start:stop], call.bias[..., start:stop]
            out, log, _, after = attend(call._replace(query=query, key=key, value=value, bias=bias), (), keys)
            assert isinstance(after, MergedKeys)
            keys = after
            readings.append(Reading(out, log))
        elif query.shape[3]:
            readings.append(read(call._replace(query=query), keys))
    return Reading.joined(readings or [read(call, keys)]), keys
