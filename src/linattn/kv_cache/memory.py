"""The merged keys of a stream, as they are kept and as they are read; letters as in kv_cache/__init__.py."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from linattn.kv_cache.codes import CodedTokens, Frames
from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.merging import reduced
from linattn.kv_cache.query_sample import QuerySample
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import is_followed
from linattn.softmax.weighted import Reading, read


class Memory(NamedTuple):
    """At most C merged keys: numbers as long as these take no more memory than codes, then codes."""

    held: Tokens | CodedTokens
    seen: Tokens  # the same, or what codes stand for, relative to their frames

    @classmethod
    def of(cls, held: Tokens | CodedTokens, config: MergedKV) -> Self:
        """Of what is kept of it."""
        if isinstance(held, Tokens):
            return cls(held, held)
        assert config.bits is not None  # as others are not coded
        return cls(held, held.tokens(config.bits))

    @property
    def tokens(self) -> Tokens:
        """The merged keys themselves."""
        return self.seen if isinstance(self.held, Tokens) else self.held.frames.outside(self.seen)

    def joined(self, leaving: Tokens, sample: QuerySample, config: MergedKV) -> Self:
        """With a block of tokens; what is too much is merged, and new numbers are rounded where they are kept so."""
        leaving, held = _precise(leaving, self.seen), self.held
        number = held.bias.shape[2] + leaving.bias.shape[2]
        if number > config.num_merged:
            return self._keeping(reduced(self.tokens.then(leaving), sample, config.num_left), config)
        if isinstance(held, Tokens):
            return self._keeping(held.then(leaving), config)
        assert config.bits is not None
        frames = held.frames_for(leaving)
        more = self._rounded(leaving, frames, config.bits)
        assert isinstance(more.held, CodedTokens)
        return type(self)(held.then(more.held), self.seen.then(more.seen))

    def read(self, query: Tensor, near: Tokens, scale: float, *, with_log: bool) -> Reading:
        """Rows (B, H, G, n, ·) over the merged keys and near ones, causally with the last of both level."""
        near = _precise(near, self.seen)
        if isinstance(self.held, Tokens):
            return read(query, self.seen.then(near), scale, is_causal=True, with_log=with_log)
        frames = self.held.frames
        tokens, rows = self.seen.then(frames.inside(near)), frames.queries(query, near.bias.dtype)
        return frames.rows(read(rows, tokens, scale, is_causal=True, with_log=with_log), query, scale)

    def _keeping(self, tokens: Tokens, config: MergedKV) -> Self:
        """Tokens in place of what is here, in frames that stay where there are some."""
        if isinstance(self.held, CodedTokens):
            frames = self.held.frames_for(tokens)
        elif config.bits is None or tokens.bias.shape[2] <= config.num_unquantized:
            return type(self)(tokens, tokens)
        else:
            frames = Frames.of(tokens)
        assert config.bits is not None
        return self._rounded(tokens, frames, config.bits)

    def _rounded(self, tokens: Tokens, frames: Frames, bits: int) -> Self:
        """Tokens as codes; for gradients rounding adds a constant."""
        exact = frames.inside(tokens)
        held = CodedTokens.of(exact, frames, bits)
        key, value = (
            x + (y - x).detach() if is_followed(x) else y for x, y in zip(exact[:2], held.tokens(bits)[:2], strict=True)
        )
        return type(self)(held, Tokens(key, value, tokens.bias))


def _precise(tokens: Tokens, like: Tokens) -> Tokens:
    """Tokens in the precision of merged keys."""
    return Tokens(*(x.to(like.bias.dtype) for x in tokens))
