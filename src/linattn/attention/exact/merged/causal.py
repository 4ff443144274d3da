"""Attention to merged keys in a stream, cut anywhere; letters as in exact/__init__.py, C merged keys.

The stream is cut into blocks. A query sees the keys of its own block up to itself, and of the window's blocks before,
as they are. As its block begins, the keys of the block before those join the merged ones. Where these are too many
then, they are merged by what a sample of the latest queries attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn.attention.exact.keys import Tokens, with_places
from linattn.attention.exact.merged.compiled import is_compiled, stream_in_compiled_code
from linattn.attention.exact.merged.few_bits import CodedTokens, Codes, Frame, Frames
from linattn.attention.exact.merged.memory import Memory
from linattn.attention.exact.merged.query_sample import QuerySample
from linattn.attention.exact.merged.stream import Stream, stream_in_torch
from linattn.attention.exact.rule import Exact, parse_exact
from linattn.attention.exact.weighted_reading import Reading
from linattn.attention.softmax import inert


@dataclass(frozen=True, eq=False)
class MergedKeys:
    """What a stream with merged keys keeps: these, the latest keys, and a sample of the queries."""

    # At most C of them, at least in float32; free places have bias -inf. Codes once they do not fit as they are.
    merged: Tokens | CodedTokens
    sample: QuerySample
    recent: Tokens  # those of the current block and of the window's before
    rule: Exact

    @classmethod
    def empty(cls, rule: Exact, key: Tensor, value: Tensor) -> MergedKeys:
        """No keys, for tokens like these (B, H, L, ·)."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        none = Tokens(key[:, :, :0], value[:, :, :0], key.new_zeros(*key.shape[:2], 0, dtype=dtype))
        return cls(Tokens(*(x.to(dtype) for x in none)), QuerySample.empty(key), none, rule)

    def tokens(self) -> Tokens:
        """All of them, codes as what they stand for."""
        return Memory.of(self.merged, self.rule).tokens.then(self.recent)

    def decay(self, log_factor: Tensor) -> MergedKeys:
        """All weights times exp(log_factor), (B or 1, H or 1); by -inf the keys and the sampled queries are masked."""
        shift = log_factor.unsqueeze(-1).to(self.recent.bias.dtype)
        merged, recent = self.merged._replace(bias=self.merged.bias + shift), self.recent
        there = self.sample.there & (shift != -torch.inf)
        sample = QuerySample(torch.where(there.unsqueeze(-1), self.sample.query, 0), there)
        return replace(self, merged=merged, sample=sample, recent=recent._replace(bias=recent.bias + shift))

    def each(self, change: Callable[[Tensor], Tensor]) -> MergedKeys:
        """The same with each tensor changed alike."""
        return _from_leaves(map(change, _leaves(self)[0]), self.rule)


class Merging(NamedTuple):
    """What `attend_causal_merging` returns: the rows of the queries, and the keys after all."""

    rows: Reading
    kept: MergedKeys


def attend_causal_merging(
    query: Tensor,  # (B, H, G, Lq, D), of the last tokens
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,
    bias: Tensor | None,
    kept: MergedKeys,
    scale: float,
    *,
    with_log: bool,
    backend: str = "auto",
) -> Merging:
    """Causal rows over the kept keys and these, w keys of a window in blocks of b tokens.

    O(L·(C + w + b)·(D + Dv) + L/(b + s)·(C + b)²·(D + Dv)) per head, for s more keys merged than must be. Many
    tokens in compiled code, where that can run them, unless the backend is "blocked".
    """
    key, value = inert(bias, key, value)
    given = kept.recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    tokens, rule = kept.recent.then(Tokens(key, value, given.expand(key.shape[:3]))), kept.rule
    stream = Stream(query, tokens, kept.recent.bias.shape[2], kept.merged, kept.sample, rule)
    compiled = is_compiled(backend, query, tokens, *_leaves(kept)[0], bits=rule.bits)
    run = stream_in_compiled_code if compiled else stream_in_torch
    rows, merged, sample = run(stream, scale, with_log=with_log)
    # Copies: views would keep all keys of the call in memory.
    block, length = rule.blocks.size, stream.num_tokens
    oldest = max(-(-length // block) - 1 - rule.blocks.number, 0) * block
    recent = Tokens(*(x.clone() for x in tokens.cut(oldest, length)))
    return Merging(rows, MergedKeys(merged, sample, recent, rule))


def _leaves(keys: MergedKeys) -> tuple[list[Tensor], Exact]:
    """Its tensors, in order, and its rule."""
    merged = keys.merged if isinstance(keys.merged, Tokens) else keys.merged.leaves()
    return [*merged, *keys.sample, *keys.recent], keys.rule


def _from_leaves(tensors: Iterable[Any], rule: Exact) -> MergedKeys:
    """Merged keys from what torch's tree utilities took out of some."""
    *merged, query, there, key, value, bias = tensors
    held = Tokens(*merged) if len(merged) == 3 else CodedTokens.from_leaves(merged)
    return MergedKeys(held, QuerySample(query, there), Tokens(key, value, bias), rule)


torch.serialization.add_safe_globals([CodedTokens, Codes, Frame, Frames, MergedKeys, QuerySample])
pytree.register_pytree_node(
    MergedKeys,
    _leaves,
    _from_leaves,
    flatten_with_keys_fn=with_places(_leaves),
    serialized_type_name="linattn.MergedKeys",
    to_dumpable_context=lambda rule: rule.label,
    from_dumpable_context=parse_exact,
)
