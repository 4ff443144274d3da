"""Keys that a stream keeps of some rows, and a call on it; letters as in kv_cache/__init__.py, S sampled queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.kv_cache.coded_tokens import CodedTokens
from linattn.kv_cache.codes import Codes, Layout
from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.frames import Frame, Frames
from linattn.kv_cache.memory import Held, Tier
from linattn.kv_cache.query_sample import QuerySample
from linattn.softmax.tokens import Restored, Tokens, register


@dataclass(frozen=True, eq=False)
class MergedKeys(Restored):
    """Merged keys and values, the first and the latest exact ones, and a sample of the queries.

    Attributes:
        sinks: keys, values and biases of the first tokens, (B, H, n ≤ `num_sinks`, ·), in their dtype.
        coded: of the coded tiers, the newest first, as the merged ones.
        merged: keys, values and biases of the merged tokens and of the newest in their codes,
            (B, H, n ≤ C + `num_newest`, ·), at least float32; free places have bias -inf. Quantized once they are more
            than take as much memory unquantized.
        sample: the latest sampled queries, which decide the next merge: (B, H, S, D).
        recent: keys, values and biases of the current block and the window's, (B, H, n ≤ w + b, ·), in their dtype.
        config: the sinks, the window, the number of merged keys, and their bits.
    """

    sinks: Tokens
    coded: tuple[Tokens | CodedTokens, ...]
    merged: Tokens | CodedTokens
    sample: QuerySample
    recent: Tokens
    config: MergedKV

    @classmethod
    def empty(cls, config: MergedKV, key: Tensor, value: Tensor) -> MergedKeys:
        """No tokens, for keys and values like these (B, H, L, ·)."""
        if config.coded or config.bits is not None:
            # Refused now: a stream has codes later.
            Layout.of(max(key.shape[-1], value.shape[-1]))
        dtype = torch.promote_types(key.dtype, torch.float32)
        # Of their own: views would keep the first call's tokens in memory where no tokens are merged.
        shape = *key.shape[:2], 0
        no_key, no_value = (x.new_zeros(*shape, x.shape[-1]) for x in (key, value))
        none = Tokens(no_key, no_value, key.new_zeros(shape, dtype=dtype))
        wide = Tokens(*(x.to(dtype) for x in none))
        return cls(none, (wide,) * len(config.tiers), wide, QuerySample.empty(key), none, config)

    def tokens(self) -> Tokens:
        """All of them, dequantized, the oldest tier before the newest: keys, values and biases (B, H, n, ·)."""
        tiers = (Tier(held).tokens() for held in (self.merged, *reversed(self.coded)))
        return reduce(Tokens.then, (*tiers, self.recent), self.sinks)

    def each(self, change: Callable[[Tensor], Tensor]) -> MergedKeys:
        """Apply a change to every tensor."""
        return _from_leaves(map(change, self.leaves()), self.outline)

    def leaves(self) -> list[Tensor]:
        """The tensors, in order."""
        tiers = [x for tier in (*self.coded, self.merged) for x in tier_leaves(tier)]
        return [*self.sinks, *tiers, *self.sample, *self.recent]

    @property
    def outline(self) -> tuple[MergedKV, tuple[int, ...]]:
        """The config, and how many tensors each tier has, the merged keys last."""
        return self.config, tuple(len(tier_leaves(tier)) for tier in (*self.coded, self.merged))


class Stream(NamedTuple):
    """Input of a call on a stream."""

    query: Tensor  # (B, H, G, Lq, D), of the last tokens
    tokens: Tokens  # (B, H, L, ·), of which earlier calls had the first
    before: MergedKeys

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.tokens.bias.shape[2]

    @property
    def num_kept(self) -> int:
        """Tokens that earlier calls had."""
        return self.before.recent.bias.shape[2]

    @property
    def first(self) -> int:
        """Number of the first query's token."""
        return self.num_tokens - self.query.shape[3]

    @property
    def begins(self) -> range:
        """Where blocks begin, from that of the first new token on."""
        size = self.before.config.blocks.size
        return range(self.num_kept // size * size, self.num_tokens, size)

    def leaving(self, begin: int) -> slice:
        """The tokens that leave the window as a block begins; none where an earlier call had tokens of this block."""
        blocks = self.before.config.blocks
        return slice(max(begin - blocks.window - blocks.size, 0), max(begin - blocks.window, 0))


def tier_leaves(tier: Held) -> list[Tensor]:
    """The tensors of a tier, in order."""
    return list(tier) if isinstance(tier, Tokens) else tier.leaves()


def _from_leaves(tensors: Iterable[Any], outline: tuple[MergedKV, tuple[int, ...]]) -> MergedKeys:
    """Keys from what torch's tree utilities took out of some."""
    leaves, (config, counts) = iter(tensors), outline
    sinks = Tokens(*islice(leaves, 3))
    *coded, merged = [(Tokens._make if size == 3 else CodedTokens.from_leaves)(islice(leaves, size)) for size in counts]
    query, there, key, value, bias = leaves
    return MergedKeys(sinks, tuple(coded), merged, QuerySample(query, there), Tokens(key, value, bias), config)


# Read by torch.load under weights_only: tensors and numbers.
torch.serialization.add_safe_globals([CodedTokens, Codes, Frame, Frames, QuerySample])
register(
    MergedKeys,
    lambda keys: (keys.leaves(), keys.outline),
    _from_leaves,
    to_dumpable_context=lambda outline: [outline[0].label, list(outline[1])],
    from_dumpable_context=lambda written: (MergedKV.parse(written[0]), tuple(written[1])),
)
