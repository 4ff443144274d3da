"""Attention to merged keys in a stream, cut anywhere; letters as in kv_cache/__init__.py.

The stream is cut into blocks. A query sees the keys of its own block up to itself, and of the window's blocks before,
exactly. As its block begins, the keys of the block before those join the merged ones. Where these are too many then,
they are merged by what a sample of the latest queries attends to.
"""

import torch
from torch import Tensor

from linattn.kv_cache.compiled import is_coded, is_compiled, stream_in_compiled_code
from linattn.kv_cache.keys import MergedKeys, Stream
from linattn.kv_cache.memory import Memory, Tier
from linattn.softmax.attention import Reading, Scoring, inert, read
from linattn.softmax.tokens import Tokens


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
