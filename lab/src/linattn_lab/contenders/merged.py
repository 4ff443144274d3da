"""Merged keys, as the library has them, quantized or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from linattn.kv_cache import MergedKV, merged_attention
from linattn.kv_cache.budget import Sizes, kept_bytes, within_bytes
from linattn_lab.contenders.contender import Contender


@dataclass(frozen=True)
class Merged(Contender):
    """`linattn.MergedKV`, and everything that its stream keeps."""

    config: MergedKV

    kind = "merged keys"
    source = "linattn.MergedKV"

    @property
    def label(self) -> str:
        """Its written form."""
        return self.config.label

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes, near: float, bits: int | None = None) -> Self:
        """The most merged keys in so many bytes; a window and its block take the share `near` of all."""
        return cls(within_bytes(num_bytes, sizes, near, bits))

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys, values and biases of the window, a block and the merged keys, and what is kept once per head."""
        return kept_bytes(self.config, sizes, num_tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The op itself, at the model's own temperature."""
        rows = query * (scale * query.shape[-1] ** 0.5)
        return merged_attention(rows, key, value, self.config, is_causal=True, enable_gqa=True)
