"""What layers keep of a stream of tokens.

Letters: B batch, Hkv key/value heads, L tokens kept, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention import State


class KeptTokens(NamedTuple):
    """What softmax attention keeps: every key and value, so that it grows with the stream.

    Attributes:
        key: (B, Hkv, L, D).
        value: (B, Hkv, L, Dv).
        key_mask: (B, L) bool, True = attend; None where no key is masked.
        key_bias: (B, Hkv, L), the logarithm of a factor on each key's weight; None without a gate.
    """

    key: Tensor
    value: Tensor
    key_mask: Tensor | None = None
    key_bias: Tensor | None = None

    def decay(self, log_factor: Tensor) -> KeptTokens:
        """The same with all weights times exp(log_factor), (B, Hkv)."""
        factor = log_factor.unsqueeze(-1)
        bias = factor.expand(self.key.shape[:3]) if self.key_bias is None else self.key_bias + factor
        return self._replace(key_bias=bias)

    def select(self, indices: Tensor) -> KeptTokens:
        """The rows `indices` of the batch, in that order."""
        return self._each(lambda x: x.index_select(0, indices))

    def detach(self) -> KeptTokens:
        """The same tokens, cut from the graph that built them."""
        return self._each(Tensor.detach)

    def to(self, device: torch.device | str) -> KeptTokens:
        """The same tokens on another device."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> KeptTokens:
        """These tokens with each tensor changed alike."""
        mask, bias = (None if x is None else change(x) for x in (self.key_mask, self.key_bias))
        return KeptTokens(change(self.key), change(self.value), mask, bias)


class Stream(NamedTuple):
    """What a layer keeps of the tokens it has seen; immutable, so that holding an old one is a fork or a roll-back.

    Attributes:
        kept: a `linattn.State`, of constant size, or the `KeptTokens` of a softmax layer.
        num_tokens: (B,) int64, how many tokens each row has seen, masked ones left out: the next one's position.
    """

    kept: State | KeptTokens
    num_tokens: Tensor

    def select(self, indices: Tensor) -> Stream:
        """The rows `indices` (1-D integer tensor) of the batch, in that order: beams, forks, compaction."""
        return Stream(self.kept.select(indices), self.num_tokens.index_select(0, indices))

    def detach(self) -> Stream:
        """The same stream, cut from the graph that built it."""
        return Stream(self.kept.detach(), self.num_tokens)

    def to(self, device: torch.device | str) -> Stream:
        """The same stream on another device."""
        return Stream(self.kept.to(device), self.num_tokens.to(device))


class Attended(NamedTuple):
    """What the `forward_with_state` of a layer or a block returns.

    Attributes:
        out: (B, L, embed_dim).
        state: the stream after the last token.
    """

    out: Tensor
    state: Stream


def kind_of(state: object) -> str:
    """What was given for a state, in words."""
    return f"a Stream of {type(state.kept).__name__}" if isinstance(state, Stream) else type(state).__name__


def extended(kept: KeptTokens | None, new: KeptTokens) -> KeptTokens:
    """The tokens kept, None for none, then the new ones."""
    if kept is None:
        return new
    held, given = ((*x.key.shape[:2], x.key.shape[-1], x.key.dtype) for x in (kept, new))
    if held != given:
        raise ValueError(
            f"the stream keeps keys of (batch, key/value heads, head width, dtype) = {held}, got tokens of {given}"
        )
    key, value = torch.cat([kept.key, new.key], 2), torch.cat([kept.value, new.value], 2)
    mask = bias = None
    if kept.key_mask is not None or new.key_mask is not None:
        mask = torch.cat([_mask(kept), _mask(new)], -1)
    if kept.key_bias is not None and new.key_bias is not None:
        bias = torch.cat([kept.key_bias, new.key_bias], -1)
    return KeptTokens(key, value, mask, bias)


def _mask(tokens: KeptTokens) -> Tensor:
    """Which tokens are attended to, (B, L)."""
    batch, _, length, _ = tokens.key.shape
    return tokens.key.new_ones(batch, length, dtype=torch.bool) if tokens.key_mask is None else tokens.key_mask


torch.serialization.add_safe_globals([KeptTokens, Stream])
