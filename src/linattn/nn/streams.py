"""Streams of tokens: the state of a layer between calls; letters as in nn/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention import State
from linattn.softmax.checking import check_indices, check_tensor

_REMEDY = "give each layer the state that it returned, moved with its .to() to where the tokens are"


class KeptTokens(NamedTuple):
    """KV cache of a softmax layer: every key and value, so that it grows with the stream.

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

    def select(self, indices: Tensor) -> KeptTokens:
        """The rows `indices` of the batch, in that order."""
        return self._each(lambda x: x.index_select(0, indices))

    def detach(self) -> KeptTokens:
        """The tokens, cut from the graph that built them."""
        return self._each(Tensor.detach)

    def to(self, device: torch.device | str) -> KeptTokens:
        """The tokens on another device."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> KeptTokens:
        """Apply a change to every tensor."""
        return KeptTokens._make(None if x is None else change(x) for x in self)


class Stream(NamedTuple):
    """State of a layer after the tokens it has seen; immutable, so that holding an old one is a fork or a roll-back.

    Attributes:
        kept: a `linattn.State`, of constant size, or the `KeptTokens` of a softmax layer.
        num_tokens: (B,) int64, how many tokens each row has seen, masked ones left out: the next one's position.
    """

    kept: State | KeptTokens
    num_tokens: Tensor

    def num_before(self, x: Tensor) -> Tensor:
        """How many tokens each row of x (B, L, E) has before it; refuse what is no such number."""
        check_tensor("num_tokens", self.num_tokens, tuple(x.shape[:1]), torch.int64, x.device, _REMEDY)
        return self.num_tokens

    def select(self, indices: Tensor) -> Stream:
        """The rows `indices` (1-D integer tensor) of the batch, in that order, copied: beams, forks, compaction."""
        indices = check_indices(indices, len(self.num_tokens))
        return Stream(self.kept.select(indices), self.num_tokens.index_select(0, indices))

    def detach(self) -> Stream:
        """The stream, cut from the graph that built it."""
        return Stream(self.kept.detach(), self.num_tokens)

    def to(self, device: torch.device | str) -> Stream:
        """The stream on another device."""
        return Stream(self.kept.to(device), self.num_tokens.to(device))


def extended(past: KeptTokens | None, new: KeptTokens, log_decay: Tensor | None = None) -> KeptTokens:
    """The tokens kept, None for none, their weights times exp(log_decay), (B, Hkv), under a gate; then the new ones."""
    if past is None:
        return new
    _check_kept(past, new)
    key, value = torch.cat([past.key, new.key], 2), torch.cat([past.value, new.value], 2)
    mask = bias = None
    if past.key_mask is not None or new.key_mask is not None:
        mask = torch.cat([shown(past.key, past.key_mask), shown(new.key, new.key_mask)], -1)
    if past.key_bias is not None and new.key_bias is not None:
        faded = past.key_bias if log_decay is None else past.key_bias + log_decay.unsqueeze(-1)
        bias = torch.cat([faded, new.key_bias], -1)
    return KeptTokens(key, value, mask, bias)


def _check_kept(past: KeptTokens, new: KeptTokens) -> None:
    """Refuse tokens kept whose tensors do not belong together, or that these do not continue."""
    length = past.key.shape[2] if isinstance(past.key, Tensor) and past.key.ndim == 4 else 0
    (batch, heads, _, width), device = new.key.shape, new.key.device
    check_tensor("key", past.key, (batch, heads, length, width), new.key.dtype, device, _REMEDY)
    check_tensor("value", past.value, (batch, heads, length, new.value.shape[3]), new.value.dtype, device, _REMEDY)
    if past.key_mask is not None:
        check_tensor("key_mask", past.key_mask, (batch, length), torch.bool, device, _REMEDY)
    if new.key_bias is not None:
        check_tensor("key_bias", past.key_bias, (batch, heads, length), new.key_bias.dtype, device, _REMEDY)


def shown(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Which keys (B, H, L, D) are attended to, (B, L)."""
    return key.new_ones(len(key), key.shape[2], dtype=torch.bool) if key_mask is None else key_mask


torch.serialization.add_safe_globals([KeptTokens, Stream])
