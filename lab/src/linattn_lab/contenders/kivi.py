"""KIVI: keys and values in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn.kv_cache.codes import GROUP, Codes, coded_bytes
from linattn.softmax.tokens import Tokens
from linattn.softmax.weighted import read
from linattn_lab.contenders.contender import Contender


@dataclass(frozen=True)
class Kivi(Contender):
    """Keys in few bits per channel, values per token, in groups of 32; the latest 32 to 64 tokens as they are.

    Where the bytes do not hold all tokens, the first 32 and the latest are kept, as sinks and window are.
    """

    bits: int
    num_quantised: int

    kind = "KIVI"
    source = "Liu et al. 2024 (arXiv 2402.02750)"

    fewest: ClassVar[int] = GROUP

    @property
    def num_held(self) -> int:
        """Tokens in few bits."""
        return self.num_quantised

    @property
    def label(self) -> str:
        """Its name with its sizes."""
        return f"{self.kind} {self.bits} bit, {self.num_quantised + 2 * GROUP} tokens"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes, bits: int) -> Self:
        """The largest in so many bytes."""
        left = num_bytes - 2 * GROUP * sizes.key_bytes
        return cls(bits, left // (GROUP * _token_bytes(sizes, bits)) * GROUP)

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Two groups as they are; of the others the codes, zero points and scales."""
        whole = min(num_tokens, 2 * GROUP)
        return whole * sizes.key_bytes + min(self.num_quantised, num_tokens - whole) * _token_bytes(sizes, self.bits)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Block by block of as many tokens as a group has."""
        rows = query.unflatten(1, (key.shape[1], -1))
        # A group of keys is a channel of consecutive tokens.
        coarse_key, coarse_value = self._rounded(key.mT).mT, self._rounded(value)
        parts = []
        for start in range(0, key.shape[2], GROUP):
            stop, near = min(start + GROUP, key.shape[2]), max(start - GROUP, 0)
            first = min(GROUP, near, self.num_quantised)
            begin = max(first, near - (self.num_quantised - first))
            seen_key = torch.cat((coarse_key[:, :, :first], coarse_key[:, :, begin:near], key[:, :, near:stop]), 2)
            seen = (coarse_value[:, :, :first], coarse_value[:, :, begin:near], value[:, :, near:stop])
            none = seen_key.new_zeros(seen_key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32))
            tokens = Tokens(seen_key, torch.cat(seen, 2), none)
            parts.append(read(rows[:, :, :, start:stop], tokens, scale, is_causal=True, with_log=False).out)
        return torch.cat(parts, 3).flatten(1, 2)

    def _rounded(self, x: Tensor) -> Tensor:
        """Rows as few bits have them, in groups of 32."""
        return Codes.of(x, self.bits).rows(x.shape[-1], self.bits, x.dtype)


def _token_bytes(sizes: Sizes, bits: int) -> int:
    """A token's codes, its share of the scales of its group's channels, and its values' scales."""
    return -(-coded_bytes(GROUP, bits) * sizes.head_dim // GROUP) + coded_bytes(sizes.value_dim, bits)
