"""Attention to merged keys in a stream, cut anywhere; letters as in exact/__init__.py, C merged keys.

The stream is cut into blocks of w tokens. A query sees the keys of its own block up to itself and of the block before
as they are. As its block begins, the keys of the block before those join the merged ones, which are then reduced to
their number by what the queries of earlier blocks say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.merging import reduced
from linattn.attention.exact.query_moments import QueryMoments
from linattn.attention.exact.rule import Exact, parse_exact
from linattn.attention.exact.weighted_reading import Reading, read
from linattn.attention.softmax import inert


@dataclass(frozen=True, eq=False)
class MergedKeys:
    """What a stream with merged keys keeps: these, the latest keys, and what is known of the queries."""

    merged: Tokens  # at most C of them, at least in float32; free places have bias -inf
    moments: QueryMoments
    recent: Tokens  # those of the block before the current one and of the current one, at most 2w
    rule: Exact

    @classmethod
    def empty(cls, rule: Exact, key: Tensor, value: Tensor) -> MergedKeys:
        """No keys, for tokens like these (B, H, L, ·)."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        none = Tokens(key[:, :, :0], value[:, :, :0], key.new_zeros(*key.shape[:2], 0, dtype=dtype))
        return cls(Tokens(*(x.to(dtype) for x in none)), QueryMoments.empty(key), none, rule)

    def tokens(self) -> Tokens:
        """All of them."""
        return self.merged.then(self.recent)

    def decay(self, log_factor: Tensor) -> MergedKeys:
        """All weights times exp(log_factor), (B or 1, H or 1)."""
        shift = log_factor.unsqueeze(-1).to(self.recent.bias.dtype)
        merged, recent = (x._replace(bias=x.bias + shift) for x in (self.merged, self.recent))
        return replace(self, merged=merged, recent=recent)

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
) -> Merging:
    """Causal rows over the kept keys and these, O(L·(C + 2w)·(D + Dv) + L/w·((C + w)²·D + (C + w)·D²)) per head."""
    key, value = inert(bias, key, value)
    given = kept.recent.bias.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    tokens = kept.recent.then(Tokens(key, value, given.expand(key.shape[:3])))
    window, num_kept, length = kept.rule.window or 1, kept.recent.bias.shape[2], tokens.bias.shape[2]
    merged, moments, first, parts = kept.merged, kept.moments, length - query.shape[3], []
    for begin in range(num_kept // window * window, length, window):
        end = min(begin + window, length)
        # Else an earlier call had tokens of this block.
        if begin >= num_kept:
            moments = moments.decay(window)
            leaving = tokens.cut(max(begin - 2 * window, 0), max(begin - window, 0))
            merged = reduced(_joined(merged, leaving), moments, kept.rule.num_merged)
        start = max(begin, first)
        if start < end:
            rows = query[:, :, :, start - first : end - first]
            seen = _joined(merged, tokens.cut(max(begin - window, 0), end))
            parts.append(read(rows, seen, scale, is_causal=True, with_log=with_log))
            moments = moments.add(rows, tokens.bias[..., start:end] != -torch.inf, scale)
    # Copies: views would keep all keys of the call in memory.
    recent = Tokens(*(x.clone() for x in tokens.cut(max(-(-length // window) - 2, 0) * window, length)))
    if not parts:
        parts.append(read(query, recent, scale, is_causal=True, with_log=with_log))
    return Merging(Reading.joined(parts), MergedKeys(merged, moments, recent, kept.rule))


def _joined(merged: Tokens, tokens: Tokens) -> Tokens:
    """Merged keys and then others, in the precision of the former."""
    return merged.then(Tokens(*(x.to(merged.bias.dtype) for x in tokens)))


def _leaves(keys: MergedKeys) -> tuple[list[Tensor], Exact]:
    """Its tensors, in order, and its rule."""
    return [*keys.merged, *keys.moments, *keys.recent], keys.rule


def _from_leaves(tensors: Iterable[Any], rule: Exact) -> MergedKeys:
    """Merged keys from what torch's tree utilities took out of some."""
    found = list(tensors)
    return MergedKeys(Tokens(*found[:3]), QueryMoments(*found[3:6]), Tokens(*found[6:]), rule)


torch.serialization.add_safe_globals([MergedKeys, QueryMoments])
pytree.register_pytree_node(
    MergedKeys,
    _leaves,
    _from_leaves,
    serialized_type_name="linattn.MergedKeys",
    to_dumpable_context=lambda rule: rule.label,
    from_dumpable_context=parse_exact,
)
