"""Merged keys, as the library's own exact part has them, whole or in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from linattn.attention import Exact, linear_attention
from linattn.attention.exact.merged.few_bits import coded_bytes
from linattn.attention.exact.merged.query_sample import sample_size
from linattn.lab.contenders.contender import Contender, Sizes


@dataclass(frozen=True)
class Merged(Contender):
    """`linattn.Exact(window=…, num_merged=…, bits=…)`, and everything that its stream keeps."""

    exact: Exact

    kind = "merged keys"
    source = "linattn.Exact"

    @property
    def label(self) -> str:
        """Its written form."""
        return self.exact.label

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes, near: float, bits: int | None = None) -> Self:
        """The most merged keys in so many bytes; a window and its block take the share `near` of all."""
        room, whole = num_bytes - _shared_bytes(sizes, bits), _near_bytes(sizes)
        widths = range(max(int(room * near / whole), 0), 0, -1)
        window = next((width for width in widths if _near(width) * whole <= room * near), 1)
        num_merged = (room - _near(window) * whole) // _merged_bytes(sizes, bits)
        if num_merged < 1:
            raise ValueError(
                f"{max(room, 0):,} bytes are left beside the sampled queries, too few for a window and merged keys; "
                "give more bytes"
            )
        return cls(Exact(window, num_merged=num_merged, bits=bits))

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys, values and biases of the window, a block and the merged keys, and what is kept once per head."""
        blocks = self.exact.blocks
        # Of a block so far: when it is most depends on whether merged keys are wider than those near.
        return max(self._kept(sizes, blocks.window + number + 1, num_tokens) for number in range(blocks.size))

    def _kept(self, sizes: Sizes, most_near: int, num_tokens: int) -> int:
        """Bytes where so many keys are near at most, and all others are merged."""
        bits, near = self.exact.bits, min(most_near, num_tokens)
        merged = min(self.exact.num_merged, num_tokens - near)
        if merged <= self.exact.num_whole:
            bits = None
        return near * _near_bytes(sizes) + merged * _merged_bytes(sizes, bits) + _shared_bytes(sizes, bits)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The op itself, at the model's own temperature."""
        rows = query * (scale * query.shape[-1] ** 0.5)
        return linear_attention(rows, key, value, None, is_causal=True, enable_gqa=True, exact=self.exact)


def _near(window: int | None) -> int:
    """Keys of a window and a block."""
    blocks = Exact(window, num_merged=1).blocks
    return blocks.window + blocks.size


def _near_bytes(sizes: Sizes) -> int:
    """A key and its value in the model's numbers, and a bias."""
    return sizes.key_bytes + sizes.statistic_bytes


def _merged_bytes(sizes: Sizes, bits: int | None) -> int:
    """A merged key and its value, and the bias."""
    if bits is None:
        return (sizes.head_dim + sizes.value_dim + 1) * sizes.statistic_bytes
    return coded_bytes(sizes.head_dim, bits) + coded_bytes(sizes.value_dim, bits) + sizes.statistic_bytes


def _shared_bytes(sizes: Sizes, bits: int | None) -> int:
    """A head's sampled queries, which are there, the state's own exponent, and in few bits means and deviations."""
    frames = 0 if bits is None else 2 * (sizes.head_dim + sizes.value_dim)
    sample = sample_size(sizes.num_groups) * (sizes.head_dim * sizes.statistic_bytes + 1)
    return sample + (1 + frames) * sizes.statistic_bytes
