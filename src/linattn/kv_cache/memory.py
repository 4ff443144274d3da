"""All tokens of a stream before its window, as they are kept and as they are read; letters as in kv_cache/__init__.py.

The first ones, attention sinks, stay exact. All others pass through tiers, each with bits of its own, and are merged at
last, or evicted.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from linattn.kv_cache.coded_tokens import CodedTokens
from linattn.kv_cache.compiled_codes import read_in_compiled_code
from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.levels import table
from linattn.kv_cache.merging import reduced
from linattn.kv_cache.query_sample import QuerySample
from linattn.kv_cache.tier import Tier
from linattn.softmax.partial import combine
from linattn.softmax.tokens import Tokens
from linattn.softmax.weighted import Reading, read


class Memory(NamedTuple):
    """The sinks, the coded tiers from the newest to the oldest, and at most C merged keys beside the newest that
    share their codes."""

    sinks: Tokens
    coded: tuple[Tier, ...]
    merged: Tier

    @classmethod
    def of(cls, sinks: Tokens, coded: tuple[Tokens | CodedTokens, ...], merged: Tokens | CodedTokens) -> Self:
        """Of what a stream keeps."""
        return cls(sinks, tuple(map(Tier, coded)), Tier(merged))

    @property
    def coded_tokens(self) -> tuple[Tokens | CodedTokens, ...]:
        """Tokens of the coded tiers, as they are kept."""
        return tuple(tier.held for tier in self.coded)

    def joined(self, leaving: Tokens, sample: QuerySample, config: MergedKV) -> Self:
        """With a block of tokens, the first ones of the stream as sinks."""
        count = min(config.num_sinks - self.sinks.bias.shape[2], leaving.bias.shape[2])
        sinks, leaving = self.sinks.then(leaving.cut(0, count)), leaving.cut(count, leaving.bias.shape[2])
        leaving = _precise(leaving, self.merged.held.bias)
        coded = []
        for tier, size in zip(self.coded, config.tiers, strict=True):
            after, leaving = tier.pushed(leaving, sample, size) if leaving.bias.shape[2] else (tier, leaving)
            coded.append(after)
        return type(self)(sinks, tuple(coded), self._merged(leaving, sample, config))

    def read(
        self, query: Tensor, near: Tokens, scale: float, *, with_log: bool, in_compiled_code: bool = False
    ) -> Reading:
        """Rows (B, H, G, n, ·) over all of it and near tokens, causally with the last of both level."""
        exact, codes = self.sinks.then(near), []
        for tier in (*self.coded, self.merged):
            if isinstance(tier.held, Tokens):
                exact = tier.held.then(exact)
            else:
                codes.append((tier.held, tier.followed))
        exact = _precise(exact, self.merged.held.bias)
        if not codes:
            return read(query, exact, scale, is_causal=True, with_log=with_log)
        rows = query.to(exact.bias.dtype)
        part = read(rows, exact, scale, is_causal=True, with_log=True).partial()
        if in_compiled_code:
            for held, _ in codes:
                part = read_in_compiled_code(rows, *held.rows, held.bias, table(held.bias), scale, part)
            out, log = part
        else:
            out, log = combine(part, *(held.read(rows, scale, followed) for held, followed in codes))
        return Reading(out.to(query.dtype), log if with_log else None)

    def tokens(self) -> Tokens:
        """All of them: the sinks, the merged keys, and the tiers, the oldest before the newest."""
        tokens = self.sinks.then(self.merged.tokens())
        for tier in reversed(self.coded):
            tokens = tokens.then(tier.tokens())
        return tokens

    def _merged(self, leaving: Tokens, sample: QuerySample, config: MergedKV) -> Tier:
        """The merged keys with more tokens; what is too much is merged."""
        number, extra, tier = self.merged.number, leaving.bias.shape[2], self.merged
        if extra == 0 or config.num_merged == 0:
            return tier
        size = config.merged_tier
        if number + extra <= size.number:
            return tier.then(leaving, sample, size)
        left = config.num_left + config.num_newest
        few, member = reduced(tier.tokens().then(leaving), sample, left, config.num_newest)
        # No more clusters are of several keys than keys are too many, and others are those that leave.
        return tier.replaced(few, member, number + 2 * extra - left, sample, size)


def _precise(tokens: Tokens, like: Tensor) -> Tokens:
    """Tokens in the precision of merged keys."""
    return Tokens(*(x.to(like.dtype) for x in tokens))
