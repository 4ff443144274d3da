"""Attention to merged keys in a stream, cut anywhere; letters as in kv_cache/__init__.py.

The stream is cut into blocks. A query sees the keys of its own block up to itself, and of the window's blocks before,
exactly. As its block begins, the keys of the block before those join the merged ones. Where these are too many then,
they are merged by what a sample of the latest queries attends to.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from linattn.kv_cache.compiled import is_coded, is_compiled, stream_in_compiled_code
from linattn.kv_cache.keys import MergedKeys
from linattn.kv_cache.stream import Stream, stream_in_torch
from linattn.softmax.attention import inert
from linattn.softmax.tokens import Tokens
from linattn.softmax.weighted import Reading


class Streamed(NamedTuple):
    """Result of `attend_causal_merging`: the rows of the queries, and the KV cache after all keys."""

    rows: Reading
    keys: MergedKeys


def attend_causal_merging(
    query: Tensor,  # (B, H, G, Lq, D), of the last tokens
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,
    bias: Tensor | None,
    before: MergedKeys,
    scale: float,
    *,
    with_log: bool,
    backend: str = "auto",
) -> Streamed:
    """Causal rows over earlier keys and these, w keys of a window in blocks of b tokens.

    O(L·(C + w + b)·(D + Dv) + L/(b + s)·(C + b)²·(D + Dv)) per head, for s more keys merged than must be. Many
    tokens in compiled code, and keys in few bits, where that can run them, unless the backend is "torch".
    """
    key, value = inert(bias, key, value)
    biases = before.recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    tokens, config = before.recent.then(Tokens(key, value, biases.expand(key.shape[:3]))), before.config
    stream = Stream(
        query, tokens, before.recent.bias.shape[2], before.sinks, before.coded, before.merged, before.sample, config
    )
    in_compiled_code = is_compiled(backend, query, tokens, *before.leaves(), config=config)
    if in_compiled_code and not is_coded(config):
        ended = stream_in_compiled_code(stream, scale, with_log=with_log)
    else:
        ended = stream_in_torch(stream, scale, with_log=with_log, in_compiled_code=in_compiled_code)
    rows, sinks, coded, merged, sample = ended
    # Copies: views would keep all keys of the call in memory.
    block, length = config.blocks.size, stream.num_tokens
    oldest = max(-(-length // block) - 1 - config.blocks.number, 0) * block
    recent = Tokens(*(x.clone() for x in tokens.cut(oldest, length)))
    if sinks.bias.shape[2] > before.sinks.bias.shape[2]:
        sinks = Tokens(*(x.clone() for x in sinks))
    return Streamed(rows, MergedKeys(sinks, coded, merged, sample, recent, config))
