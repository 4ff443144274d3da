"""KIVI: keys and values in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn.softmax.tokens import Tokens
from linattn.softmax.weighted import read
from linattn_lab.contenders.contender import Contender

_GROUP = 32


@dataclass(frozen=True)
class Kivi(Contender):
    """Keys in few bits per channel, values per token, in groups of 32; the latest 32 to 64 tokens as they are.

    Where the bytes do not hold all tokens, the first 32 and the latest are kept, as sinks and window are.
    """

    bits: int
    num_quantised: int

    kind = "KIVI"
    source = "Liu et al. 2024 (arXiv 2402.02750)"

    fewest: ClassVar[int] = _GROUP

    @property
    def num_held(self) -> int:
        """Tokens in few bits."""
        return self.num_quantised

    @property
    def label(self) -> str:
        """Its name with its sizes."""
        return f"{self.kind} {self.bits} bit, {self.num_quantised + 2 * _GROUP} tokens"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes, bits: int) -> Self:
        """The largest in so many bytes."""
        left = num_bytes - 2 * _GROUP * sizes.key_bytes
        return cls(bits, left // (_GROUP * _token_bytes(sizes, bits)) * _GROUP)

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Two groups as they are; of the others the codes, zero points and scales."""
        whole = min(num_tokens, 2 * _GROUP)
        return whole * sizes.key_bytes + min(self.num_quantised, num_tokens - whole) * _token_bytes(sizes, self.bits)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Block by block of as many tokens as a group has."""
        rows = query.unflatten(1, (key.shape[1], -1))
        # A group of keys is a channel of consecutive tokens.
        coarse_key, coarse_value = self._rounded(key.mT).mT, self._rounded(value)
        parts = []
        for start in range(0, key.shape[2], _GROUP):
            stop, near = min(start + _GROUP, key.shape[2]), max(start - _GROUP, 0)
            first = min(_GROUP, near, self.num_quantised)
            begin = max(first, near - (self.num_quantised - first))
            seen_key = torch.cat((coarse_key[:, :, :first], coarse_key[:, :, begin:near], key[:, :, near:stop]), 2)
            seen = (coarse_value[:, :, :first], coarse_value[:, :, begin:near], value[:, :, near:stop])
            none = seen_key.new_zeros(seen_key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32))
            tokens = Tokens(seen_key, torch.cat(seen, 2), none)
            parts.append(read(rows[:, :, :, start:stop], tokens, scale, is_causal=True, with_log=False).out)
        return torch.cat(parts, 3).flatten(1, 2)

    def _rounded(self, x: Tensor) -> Tensor:
        """Rows as few bits have them, in groups of 32."""
        return rounded(x, self.bits)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Numbers rounded to 2^bits levels between the least and the largest of each 32 of a row, the last ones fewer.

        z + s·round((x - z) / s),   z = min x,   s = (max x - min x) / (2^bits - 1),   z and s in float16

    Example:
        >>> rounded(torch.tensor([0.0, 1.4, 3.0]), 2).tolist()
        [0.0, 1.0, 3.0]
    """
    most, parts = 2**bits - 1, []
    for group in x.split(_GROUP, -1):
        zero = group.amin(-1, keepdim=True).half().to(x.dtype)
        step = ((group.amax(-1, keepdim=True) - zero) / most).half().to(x.dtype)
        level = ((group - zero) / torch.where(step == 0, 1, step)).round().clamp(0, most)
        parts.append(zero + step * level)
    return torch.cat(parts, -1)


def _row_bytes(width: int, bits: int) -> int:
    """Bytes of a row's levels, zero points and steps."""
    return -(-width * bits // 8) + 4 * -(-width // _GROUP)


def _token_bytes(sizes: Sizes, bits: int) -> int:
    """A token's codes, its share of the scales of its group's channels, and its values' scales."""
    return -(-_row_bytes(_GROUP, bits) * sizes.head_dim // _GROUP) + _row_bytes(sizes.value_dim, bits)
