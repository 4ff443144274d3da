"""One call of a stream with merged keys, block by block in plain torch; letters as in kv_cache/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.frames import CodedTokens
from linattn.kv_cache.memory import Memory
from linattn.kv_cache.query_sample import QuerySample
from linattn.softmax.tokens import Tokens
from linattn.softmax.weighted import Reading, read


class Stream(NamedTuple):
    """Input of a call on a stream."""

    query: Tensor  # (B, H, G, Lq, D), of the last tokens
    tokens: Tokens  # (B, H, L, ·), of which earlier calls had the first
    num_kept: int  # so many
    sinks: Tokens
    coded: tuple[Tokens | CodedTokens, ...]
    merged: Tokens | CodedTokens
    sample: QuerySample
    config: MergedKV

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.tokens.bias.shape[2]

    @property
    def first(self) -> int:
        """Number of the first query's token."""
        return self.num_tokens - self.query.shape[3]

    @property
    def begins(self) -> range:
        """Where blocks begin, from that of the first new token on."""
        size = self.config.blocks.size
        return range(self.num_kept // size * size, self.num_tokens, size)

    def leaving(self, begin: int) -> slice:
        """The tokens that leave the window as a block begins; none where an earlier call had tokens of this block."""
        blocks = self.config.blocks
        return slice(max(begin - blocks.window - blocks.size, 0), max(begin - blocks.window, 0))


class Ended(NamedTuple):
    """Output of a call on a stream."""

    rows: Reading
    sinks: Tokens
    coded: tuple[Tokens | CodedTokens, ...]
    merged: Tokens | CodedTokens
    sample: QuerySample


def stream_in_torch(stream: Stream, scale: float, *, with_log: bool, in_compiled_code: bool = False) -> Ended:
    """All blocks, one after the other; differentiable but where codes are read in compiled code."""
    query, tokens, config, first = stream.query, stream.tokens, stream.config, stream.first
    blocks, memory, sample, parts = (
        config.blocks,
        Memory.of(stream.sinks, stream.coded, stream.merged),
        stream.sample,
        [],
    )
    for begin in stream.begins:
        end = min(begin + blocks.size, stream.num_tokens)
        gone = stream.leaving(begin)
        if gone.start < gone.stop:
            memory = memory.joined(tokens.cut(gone.start, gone.stop), sample, config)
        start = max(begin, first)
        if start < end:
            rows = query[:, :, :, start - first : end - first]
            near = tokens.cut(gone.stop, end)
            parts.append(memory.read(rows, near, scale, with_log=with_log, in_compiled_code=in_compiled_code))
            live = tokens.bias[..., start:end] != -torch.inf
            sample = sample.add(rows, live, scale, block=blocks.size, first=start - begin)
    if not parts:
        parts.append(read(query, tokens.cut(0, 0), scale, is_causal=True, with_log=with_log))
    return Ended(Reading.joined(parts), memory.sinks, memory.coded_tokens, memory.merged.held, sample)
