"""Attention to merged keys in a stream of each row's live tokens, cut anywhere; letters as in kv_cache/__init__.py.

The stream is cut into blocks. A query sees the keys of its own block up to itself, and of the window's blocks before,
exactly. As its block begins, the keys of the block before those join the merged ones. Where these are too many then,
they are merged by what a sample of the latest queries attends to.

`attend_by_groups` cuts off masked tokens before a row's first live one. Later ones would take the room of others: such
a call is cut into runs of live tokens, which go on with the stream, and of masked ones, which only read it.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.kv_cache.compiled import is_coded, is_compiled, stream_in_compiled_code
from linattn.kv_cache.keys import MergedKeys, Stream
from linattn.kv_cache.memory import Memory, Tier
from linattn.softmax.attention import Reading, Scoring, inert, read
from linattn.softmax.row_groups import RowGroups, Streamed, attend_by_groups, has_begun, in_order, rows_from, rows_of
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import has_values

Kept = MergedKeys | RowGroups[MergedKeys]
Attend = Callable[[Any, Sequence[Tensor], MergedKeys], Streamed[MergedKeys]]
Read = Callable[[Any, MergedKeys], Reading]


def attend_live_tokens(
    call: Any, keys: Kept | None, nothing: Callable[[], MergedKeys], attend: Attend, look: Read, *, is_stream: bool
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
                (members, *_by_runs(rows_from(call, members, 0), pattern, rows_of(held, places), attend, look))
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
    call: Any, live: Sequence[bool], keys: MergedKeys, attend: Attend, look: Read
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
            readings.append(look(call._replace(query=query), keys))
    return Reading.joined(readings or [look(call, keys)]), keys


def attend_causal_merging(
    query: Tensor,  # (B, H, G, Lq, D), of the last tokens
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,
    bias: Tensor | None,
    before: MergedKeys,
    scoring: Scoring,
    *,
    with_log: bool,
    backend: str = "auto",
) -> tuple[Reading, MergedKeys]:
    """Causal rows over earlier keys and these, w keys of a window in blocks of b tokens, and the KV cache after all."""
    key, value = inert(bias, key, value)
    biases = before.recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    tokens, config = before.recent.then(Tokens(key, value, biases.expand(key.shape[:3]))), before.config
    stream = Stream(query, tokens, before)
    in_compiled_code = is_compiled(backend, scoring.soft_cap, query, tokens, *before.leaves(), config=config)
    if in_compiled_code and not is_coded(config):
        rows, keys = stream_in_compiled_code(stream, scoring.scale, with_log=with_log)
    else:
        rows, keys = stream_in_torch(stream, scoring, with_log=with_log, in_compiled_code=in_compiled_code)
    # Copies: views would keep all keys of the call in memory.
    block, length = config.blocks.size, stream.num_tokens
    oldest = max(-(-length // block) - 1 - config.blocks.number, 0) * block
    recent = Tokens(*(x.clone() for x in tokens.cut(oldest, length)))
    is_new = keys.sinks.bias.shape[2] > before.sinks.bias.shape[2]
    sinks = keys.sinks if is_new else before.sinks
    # A text may go on in a wider dtype, which the recent tokens have then.
    sinks = Tokens(*(x.to(like.dtype, copy=is_new) for x, like in zip(sinks, recent, strict=True)))
    after = MergedKeys(sinks, keys.coded, keys.merged, keys.sample, recent, config)
    # Sinks, and tiers that nothing has entered, are as they came, with a graph that gradients have built before.
    is_over = not torch.is_grad_enabled() and any(x.requires_grad for x in after.leaves())
    return rows, after.each(Tensor.detach) if is_over else after


def stream_in_torch(
    stream: Stream, scoring: Scoring, *, with_log: bool, in_compiled_code: bool
) -> tuple[Reading, MergedKeys]:
    """All blocks, one after the other, without the recent keys; differentiable but in compiled code."""
    query, tokens, before, first, parts = stream.query, stream.tokens, stream.before, stream.first, []
    *tiers, merged = (Tier(held, None, in_compiled_code) for held in (*before.coded, before.merged))
    memory = Memory(before.sinks, tuple(tiers), merged)
    sample, config = before.sample, before.config
    for begin in stream.begins:
        end = min(begin + config.blocks.size, stream.num_tokens)
        gone = stream.leaving(begin)
        if gone.start < gone.stop:
            memory = memory.joined(tokens.cut(gone.start, gone.stop), sample, config, scoring.soft_cap)
        start = max(begin, first)
        if start < end:
            rows = query[:, :, :, start - first : end - first]
            near = tokens.cut(gone.stop, end)
            parts.append(memory.read(rows, near, scoring, with_log=with_log))
            live = tokens.bias[..., start:end] != -torch.inf
            sample = sample.add(rows, live, scoring.scale, block=config.blocks.size, first=start - begin)
    joined = Reading.joined(parts or [read(query, tokens.cut(0, 0), scoring, is_causal=True, with_log=with_log)])
    coded = tuple(tier.held for tier in memory.coded)
    return joined, MergedKeys(memory.sinks, coded, memory.merged.held, sample, before.recent, config)
