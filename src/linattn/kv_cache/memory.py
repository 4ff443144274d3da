"""All tokens of a stream before its window, as they are kept and as they are read; letters as in kv_cache/__init__.py.

The first ones, attention sinks, stay exact. All others pass through tiers, each with bits of its own, and are merged at
last, or evicted. A tier keeps numbers as long as these take no more memory than codes, then codes. Numbers are rounded
as they become codes, and again only where the tier's frames are taken anew.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from linattn.kv_cache.coded_tokens import CodedTokens, read_in_compiled_code
from linattn.kv_cache.codes import LARGEST
from linattn.kv_cache.config import MergedKV, TierSize
from linattn.kv_cache.frames import Frames
from linattn.kv_cache.levels import table
from linattn.kv_cache.merging import reduced
from linattn.kv_cache.query_sample import QuerySample
from linattn.softmax.attention import Reading, Scoring, read
from linattn.softmax.partial import combine
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import has_values, is_followed

# Times the tokens of the first frames of which they are taken once more: what the first are of says less of a text.
_AGAIN = 3
# Tokens of a tier that are looked at: a row is rounded by its size, of which their mean's distance may be most. Of
# fewer than eight, where a tier has room for more, each coordinate's deviation is one by chance.
_LOOKED, _FEWEST = 64, 8

Held = Tokens | CodedTokens
"""Tokens in numbers, or in codes."""


class Tier(NamedTuple):
    """Tokens, each for itself or weighted."""

    held: Held
    followed: Tokens | None = None  # what codes stand for, relative to their frames, where gradients follow it
    in_compiled_code: bool = False  # whether codes are written and read there

    @property
    def number(self) -> int:
        """How many there are, absent ones included."""
        return self.held.bias.shape[2]

    def tokens(self) -> Tokens:
        """Keys and values themselves."""
        return self.held if isinstance(self.held, Tokens) else self.held.frames.outside(self._numbers())

    def then(self, tokens: Tokens, sample: QuerySample, size: TierSize, *, gone: int = 0) -> Self:
        """With more tokens, no more than the tier has room for in all, where so many have left it."""
        held, number = self.held, gone + self.number
        if isinstance(held, Tokens):
            # A copy of the first ones: a view would keep all tokens that they came with.
            both = held.then(tokens) if self.number else Tokens(*(x.clone() for x in tokens))
            return self.of(both, sample, size)
        if number < _AGAIN * size.num_unquantized(tokens.bias.element_size()) <= number + tokens.bias.shape[2]:
            return self.of(self.tokens().then(tokens), sample, size)
        return self._appended(tokens, sample, size)

    def pushed(self, tokens: Tokens, sample: QuerySample, size: TierSize) -> tuple[Self, Tokens]:
        """With more tokens, and the oldest ones, which it has no room for."""
        excess = self.number + tokens.bias.shape[2] - size.number
        if excess <= 0:
            return self.then(tokens, sample, size), tokens.cut(0, 0)
        count = min(excess, self.number)
        oldest, rest = self.cut(0, count).tokens(), self.cut(count, self.number)
        # Of a block larger than the tier some pass through.
        through = max(excess - self.number, 0)
        after = rest.then(tokens.cut(through, tokens.bias.shape[2]), sample, size, gone=count)
        return after, oldest.then(tokens.cut(0, through))

    def of(self, tokens: Tokens, sample: QuerySample, size: TierSize) -> Self:
        """Tokens in place of what is here: codes where they are too many for numbers."""
        if size.bits is None or tokens.bias.shape[2] <= size.num_unquantized(tokens.bias.element_size()):
            return self._replace(held=tokens, followed=None)
        frames = Frames.of(tokens, size.both_bits, sample.power)
        held, followed = self._rounded(frames.inside(tokens), frames, size)
        return self._replace(held=held, followed=followed)

    def cut(self, start: int, stop: int) -> Self:
        """Consecutive tokens."""
        followed = None if self.followed is None else self.followed.cut(start, stop)
        return self._replace(held=self.held.cut(start, stop), followed=followed)

    def replaced(self, few: Tokens, member: Tensor, number_new: int, sample: QuerySample, size: TierSize) -> Self:
        """Fewer tokens (B, H, C, ·) in place of these and of more; a token that is one of these keeps its code."""
        if isinstance(self.held, Tokens):
            return self.of(few, sample, size)
        # Members (B, H, C) beyond these are any other token, of which `number_new` at most are new.
        is_new = member >= self.number
        place = is_new.byte().argsort(dim=-1, descending=True, stable=True)[..., : min(number_new, few.bias.shape[2])]
        pool = self._appended(few.pick(place), sample, size)
        index = torch.where(is_new, self.number + is_new.cumsum(-1) - 1, member)
        assert isinstance(pool.held, CodedTokens)
        followed = None if pool.followed is None else pool.followed.pick(index)._replace(bias=few.bias)
        return self._replace(held=pool.held.at(index, few.bias), followed=followed)

    def _appended(self, tokens: Tokens, sample: QuerySample, size: TierSize) -> Self:
        """With codes of more tokens; of heads that their frames do not fit all are rounded anew, in frames of all."""

        def by_head(x: Tensor, anew: Tensor) -> Tensor:
            """Numbers (B, H, …) as they are or anew."""
            return torch.where(fits.view(*fits.shape, *[1] * (x.ndim - 2)), x, anew)

        assert isinstance(self.held, CodedTokens)
        exact = self.held.frames.inside(tokens)
        more, followed = self._rounded(exact, self.held.frames, size)
        held = self.held.then(more)
        fits = self._fits(exact, held, 1 if held.bias.shape[2] >= size.number else _FEWEST)
        if self.followed or followed:
            followed = self._numbers().then(followed or more.decoded(in_compiled_code=self.in_compiled_code))
        if not has_values(fits) or not bool(fits.all()):
            every = self.tokens().then(tokens)
            frames = Frames.of(every, size.both_bits, sample.power)
            anew, numbers = self._rounded(frames.inside(every), frames, size)
            held = CodedTokens.from_leaves(map(by_head, held.leaves(), anew.leaves()))
            followed = followed and numbers and Tokens(*map(by_head, followed, numbers))
        return self._replace(held=held, followed=followed)

    def _fits(self, exact: Tokens, every: CodedTokens, least: int) -> Tensor:
        """Whether heads (B, H) have tokens, in whose frames codes reach more, from which all have not moved."""
        bias, number, moved = every.bias, every.bias.shape[2], _have_moved(exact)
        sizes = torch.stack([torch.linalg.vector_norm(x, dim=-1).amax(-1) for x in exact[:2]])
        # In what is no number there is nothing to be taken anew of.
        fits = (self.held.bias != -torch.inf).any(-1) & ~((sizes > LARGEST) & (sizes < torch.inf)).any(0)
        if not has_values(moved) or bool(moved.any()):
            # A few new ones may be alike by chance: they count for no more of a tier than they are.
            place = torch.arange(0, number, max(number // _LOOKED, 1), device=bias.device).expand(*bias.shape[:2], -1)
            looked = every.at(place, bias.gather(-1, place)).decoded(in_compiled_code=self.in_compiled_code)
            fits = fits & ~(moved & _have_moved(looked, least))
        return fits

    def _rounded(self, exact: Tokens, frames: Frames, size: TierSize) -> tuple[CodedTokens, Tokens | None]:
        """Codes, and what they stand for where gradients follow it: for them rounding adds a constant."""
        held = CodedTokens.of(exact, frames, size.both_bits, in_compiled_code=self.in_compiled_code)
        if not is_followed(*exact[:2]):
            return held, None
        key, value = (x + (y - x).detach() for x, y in zip(exact[:2], held.decoded()[:2], strict=True))
        return held, Tokens(key, value, exact.bias)

    def _numbers(self) -> Tokens:
        """Decode, relative to the frames, where gradients do not follow numbers already."""
        assert isinstance(self.held, CodedTokens)
        return self.followed or self.held.decoded(in_compiled_code=self.in_compiled_code)


def _have_moved(tokens: Tokens, least: int = 1) -> Tensor:
    """Heads (B, H) of whose tokens, relative to their frames, the mean is further away than they are spread."""
    there = (tokens.bias != -torch.inf).to(tokens.bias.dtype)
    count = there.sum(-1)
    share = (there / count.clamp(min=1).unsqueeze(-1)).unsqueeze(2)
    # E|x - μ|² = E|x|² - |μ|².
    far = [2 * (share @ x).square().sum((2, 3)) > (share @ x.square()).sum((2, 3)) for x in tokens[:2]]
    return (far[0] | far[1]) & (count >= least)


class Memory(NamedTuple):
    """The sinks, the coded tiers, the newest first, and C merged keys at most beside the newest in their codes."""

    sinks: Tokens
    coded: tuple[Tier, ...]
    merged: Tier

    def joined(self, leaving: Tokens, sample: QuerySample, config: MergedKV, soft_cap: float | None) -> Self:
        """With a block of tokens, the first ones of the stream as sinks."""
        count = min(config.num_sinks - self.sinks.bias.shape[2], leaving.bias.shape[2])
        sinks, leaving = self.sinks.then(leaving.cut(0, count)), leaving.cut(count, leaving.bias.shape[2])
        leaving = Tokens(*(x.to(self.merged.held.bias.dtype) for x in leaving))
        coded = []
        for tier, size in zip(self.coded, config.tiers, strict=True):
            after, leaving = tier.pushed(leaving, sample, size) if leaving.bias.shape[2] else (tier, leaving)
            coded.append(after)
        return type(self)(sinks, tuple(coded), self._merged(leaving, sample, config, soft_cap))

    def read(self, query: Tensor, near: Tokens, scoring: Scoring, *, with_log: bool) -> Reading:
        """Rows (B, H, G, n, ·) over all of it and near tokens, causally with the last of both level."""
        exact, codes = self.sinks.then(near), []
        for tier in (*self.coded, self.merged):
            if isinstance(tier.held, Tokens):
                exact = tier.held.then(exact)
            else:
                codes.append((tier.held, tier.followed))
        exact = Tokens(*(x.to(self.merged.held.bias.dtype) for x in exact))
        if not codes:
            return read(query, exact, scoring, is_causal=True, with_log=with_log)
        rows = query.to(exact.bias.dtype)
        part = read(rows, exact, scoring, is_causal=True, with_log=True).partial()
        if self.merged.in_compiled_code:
            for held, _ in codes:
                part = read_in_compiled_code(rows, held, table(held.bias), scoring.scale, part)
        else:
            part = combine(part, *(held.read(rows, scoring, followed) for held, followed in codes))
        return Reading(part.out.to(query.dtype), part.log_normalizer if with_log else None)

    def _merged(self, leaving: Tokens, sample: QuerySample, config: MergedKV, soft_cap: float | None) -> Tier:
        """The merged keys with more tokens; what is too much is merged."""
        number, extra, tier = self.merged.number, leaving.bias.shape[2], self.merged
        if extra == 0 or config.num_merged == 0:
            return tier
        size = config.merged_tier
        if number + extra <= size.number:
            return tier.then(leaving, sample, size)
        both, left = tier.tokens().then(leaving), config.num_left + config.num_newest
        few, member = reduced(both, sample, left, config.num_newest, soft_cap, along_axes=config.bits is not None)
        # No more clusters are of several keys than keys are too many, and others are those that leave.
        return tier.replaced(few, member, number + 2 * extra - left, sample, size)
