"""All tokens of a stream before its window, as they are kept and as they are read; letters as in kv_cache/__init__.py.

The first ones, attention sinks, stay exact. All others are merged: numbers as long as these take no more memory than
codes, then codes.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from linattn.kv_cache.coded_tokens import CodedTokens
from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.frames import Frames
from linattn.kv_cache.merging import reduced
from linattn.kv_cache.query_sample import QuerySample
from linattn.softmax.partial import combine
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import is_followed
from linattn.softmax.weighted import Reading, read

# Times the tokens of the first frames of which they are taken once more: what the first are of says less of a text.
_AGAIN = 3


class Memory(NamedTuple):
    """The sinks, and at most C merged keys."""

    sinks: Tokens
    held: Tokens | CodedTokens
    followed: Tokens | None = None  # what codes stand for, relative to their frames, where gradients follow it

    def joined(self, leaving: Tokens, sample: QuerySample, config: MergedKV) -> Self:
        """With a block of tokens, the first ones of the stream as sinks; what is too much of the others is merged.

        Numbers are rounded as they become codes, and never again while their key stays.
        """
        number = leaving.bias.shape[2]
        count = min(config.num_sinks - self.sinks.bias.shape[2], number)
        sinks, leaving = self.sinks.then(leaving.cut(0, count)), leaving.cut(count, number)
        memory = self._replace(sinks=sinks)
        return memory if count == number else memory._with(_precise(leaving, self.held), sample, config)

    def read(self, query: Tensor, near: Tokens, scale: float, *, with_log: bool) -> Reading:
        """Rows (B, H, G, n, ·) over the sinks, the merged keys and near ones, causally with the last of both level."""
        exact = _precise(self.sinks.then(near), self.held)
        if isinstance(self.held, Tokens):
            return read(query, self.held.then(exact), scale, is_causal=True, with_log=with_log)
        rows = query.to(exact.bias.dtype)
        part = read(rows, exact, scale, is_causal=True, with_log=True).partial()
        out, log = combine(part, self.held.read(rows, scale, self.followed))
        return Reading(out.to(query.dtype), log if with_log else None)

    def tokens(self) -> Tokens:
        """The merged keys and values themselves."""
        if isinstance(self.held, Tokens):
            return self.held
        return self.held.frames.outside(self.held.decoded() if self.followed is None else self.followed)

    def _with(self, leaving: Tokens, sample: QuerySample, config: MergedKV) -> Self:
        """With tokens that are merged keys from now on, each for itself."""
        held, number = self.held, self.held.bias.shape[2] + leaving.bias.shape[2]
        if number > config.num_merged:
            tokens = self.tokens().then(leaving)
            few, member = reduced(tokens, sample, config.num_left)
            if isinstance(held, Tokens):
                return self._begun(few, sample, config)
            return self._merged(leaving, few, member, sample, config)
        if isinstance(held, Tokens):
            return self._begun(held.then(leaving), sample, config)
        if held.bias.shape[2] < _AGAIN * config.num_unquantized <= number:
            tokens = self.tokens().then(leaving)
            return self._rounded(tokens, Frames.of(tokens, config.both_bits, sample.power), config)
        return self._appended(leaving, sample, config)

    def _begun(self, tokens: Tokens, sample: QuerySample, config: MergedKV) -> Self:
        """Tokens in place of numbers: as codes where they are too many for these."""
        if config.bits is None or tokens.bias.shape[2] <= config.num_unquantized:
            return self._replace(held=tokens)
        return self._rounded(tokens, Frames.of(tokens, config.both_bits, sample.power), config)

    def _appended(self, tokens: Tokens, sample: QuerySample, config: MergedKV) -> Self:
        """With codes of more tokens, in the frames of heads that have some."""
        assert isinstance(self.held, CodedTokens)
        others = Frames.of(tokens, config.both_bits, sample.power)
        more = self._rounded(tokens, self.held.frames.where(self.held.is_there, others), config)
        assert isinstance(more.held, CodedTokens)
        followed = self.followed
        if more.followed is not None or followed is not None:
            followed = _numbers(self).then(_numbers(more))
        return self._replace(held=self.held.then(more.held), followed=followed)

    def _merged(self, leaving: Tokens, few: Tokens, member: Tensor, sample: QuerySample, config: MergedKV) -> Self:
        """Fewer keys in place of these and some that leave: those that stay alone keep their codes.

        `member` (B, H, C) is the number of a key that is alone, and that of all keys for a cluster of several.
        """
        number, extra = self.held.bias.shape[2], leaving.bias.shape[2]
        is_new = member >= number
        # No more clusters are of several keys than keys are too many.
        most = min(2 * extra + number - config.num_left, few.bias.shape[2])
        place = is_new.byte().argsort(dim=-1, descending=True, stable=True)[..., :most]
        pool = self._appended(few.pick(place), sample, config)
        index = torch.where(is_new, number + is_new.cumsum(-1) - 1, member)
        assert isinstance(pool.held, CodedTokens)
        followed = None if pool.followed is None else pool.followed.pick(index)._replace(bias=few.bias)
        return self._replace(held=pool.held.at(index, few.bias), followed=followed)

    def _rounded(self, tokens: Tokens, frames: Frames, config: MergedKV) -> Self:
        """Codes in place of what is here; for gradients rounding adds a constant."""
        exact = frames.inside(tokens)
        held = CodedTokens.of(exact, frames, config.both_bits)
        if not is_followed(*exact[:2]):
            return self._replace(held=held, followed=None)
        key, value = (x + (y - x).detach() for x, y in zip(exact[:2], held.decoded()[:2], strict=True))
        return self._replace(held=held, followed=Tokens(key, value, tokens.bias))


def _numbers(memory: Memory) -> Tokens:
    """Rows that codes stand for, in their frames' coordinates."""
    assert isinstance(memory.held, CodedTokens)
    return memory.held.decoded() if memory.followed is None else memory.followed


def _precise(tokens: Tokens, like: Tokens | CodedTokens) -> Tokens:
    """Tokens in the precision of merged keys."""
    return Tokens(*(x.to(like.bias.dtype) for x in tokens))
