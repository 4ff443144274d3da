"""Merged keys, as the library's own exact part has them, and in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from linattn.attention import Exact, linear_attention, softmax_attention
from linattn.attention.exact import MergedKeys, attend_causal_merging
from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.query_sample import sample_size
from linattn.lab.contenders.contender import Contender, Sizes
from linattn.lab.contenders.quantising import mixed, quantised, scale_bytes

# Tokens by which channels are measured, where there is room for them.
_MOST_FIRST = 512


@dataclass(frozen=True)
class Merged(Contender):
    """`linattn.Exact(window=…, num_merged=…)`, and everything that its stream keeps."""

    exact: Exact

    kind = "merged keys"
    source = "linattn.Exact"

    @property
    def label(self) -> str:
        """Its written form."""
        return self.exact.label

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes, near: float) -> Self:
        """The most merged keys in so many bytes; a window and its block take the share `near` of all."""
        each = sizes.key_bytes + sizes.statistic_bytes
        return cls(_split((num_bytes - sample_bytes(sizes)) // each, near))

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys, values and biases of the window, a block and the merged keys, and the sampled queries."""
        kept = min(self.exact.cost(is_causal=True).kept, num_tokens)
        return kept * (sizes.key_bytes + sizes.statistic_bytes) + sample_bytes(sizes)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The op itself, at the model's own temperature."""
        rows = query * (scale * query.shape[-1] ** 0.5)
        return linear_attention(rows, key, value, None, is_causal=True, enable_gqa=True, exact=self.exact)


@dataclass(frozen=True)
class MergedInFewBits(Contender):
    """Merged keys in few bits behind a window that is kept as it is.

    Keys have channels that are large in every token, which is why KIVI rounds them channel by channel; merged keys have
    no groups of tokens, so that here a channel's mean and deviation are taken from the first tokens, as many as the
    bytes hold as they are and no more than 512, and keys are rounded relative to these. The queries of these tokens
    read them as they are. Keys and values are rounded in a mixed basis, in which no coordinate is far from the others.
    """

    exact: Exact
    num_first: int
    bits: int

    kind = "merged keys in few bits"
    source = "linattn.Exact; arXiv 2402.02750, 2404.00456"

    @property
    def label(self) -> str:
        """Its written form and the bits."""
        return f"{self.exact.label}, {self.bits} bit"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes, near: float, bits: int) -> Self:
        """The most merged keys in so many bytes; a window and its block have the share `near` of these."""
        each = sizes.key_bytes + sizes.statistic_bytes
        window = _split((num_bytes - sample_bytes(sizes)) // each, near).window
        left = num_bytes - cls._shared_bytes(sizes) - _near(window) * each
        exact = Exact(window, num_merged=left // cls._token_bytes(sizes, bits))
        return cls(exact, min(num_bytes // sizes.key_bytes, _MOST_FIRST), bits)

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys of the window and a block as they are, codes and scales, biases, and what is kept once per head."""
        if num_tokens <= self.num_first:
            return num_tokens * sizes.key_bytes
        each, whole = sizes.key_bytes + sizes.statistic_bytes, min(_near(self.exact.window), num_tokens)
        few = min(self.exact.num_merged, num_tokens - whole)
        return whole * each + few * self._token_bytes(sizes, self.bits) + self._shared_bytes(sizes)

    @staticmethod
    def _shared_bytes(sizes: Sizes) -> int:
        """The sampled queries, and the channels' means and deviations."""
        return sample_bytes(sizes) + 2 * sizes.head_dim * sizes.number_bytes

    @staticmethod
    def _token_bytes(sizes: Sizes, bits: int) -> int:
        """A key and its value in groups of channels, and its bias."""
        codes = -(-(sizes.head_dim + sizes.value_dim) * bits // 8)
        return codes + scale_bytes(sizes.head_dim) + scale_bytes(sizes.value_dim) + sizes.statistic_bytes

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The stream itself, with what was merged rounded before it is read."""
        rows, first = query.unflatten(1, (key.shape[1], -1)), key[:, :, : self.num_first]
        mean, spread = first.mean(2, keepdim=True), first.std(2, keepdim=True, correction=0)
        spread = torch.where(spread == 0, 1, spread)

        def rounded(merged: Tokens) -> Tokens:
            """As they are kept."""
            coarse = self._rounded((merged.key - mean) / spread) * spread + mean
            return Tokens(coarse, self._rounded(merged.value), merged.bias)

        nothing = MergedKeys.empty(self.exact, key, value)
        found = attend_causal_merging(rows, key, value, None, nothing, scale, with_log=False, as_kept=rounded).rows.out
        near = query[:, :, : self.num_first], first, value[:, :, : self.num_first]
        whole = softmax_attention(*near, is_causal=True, scale=scale, enable_gqa=True)
        return torch.cat((whole, found.flatten(1, 2)[:, :, self.num_first :]), 2)

    def _rounded(self, x: Tensor) -> Tensor:
        """Numbers as few bits have them."""
        return mixed(quantised(mixed(x), self.bits, -1))


def sample_bytes(sizes: Sizes) -> int:
    """Bytes of a head's sampled queries, of which are there, and of the state's own exponent."""
    return sample_size(sizes.num_groups) * (sizes.head_dim * sizes.statistic_bytes + 1) + sizes.statistic_bytes


def _split(num_keys: int, near: float) -> Exact:
    """The widest window whose keys and block are no more than the share `near` of so many; merged keys are the rest."""
    window = next((w for w in range(int(num_keys * near), 0, -1) if _near(w) <= num_keys * near), 1)
    if num_keys - _near(window) < 1:
        raise ValueError(
            f"{max(num_keys, 0)} keys are left beside the sampled queries, too few for a window and merged keys; "
            "give more bytes"
        )
    return Exact(window=window, num_merged=num_keys - _near(window))


def _near(window: int | None) -> int:
    """Keys of a window and a block."""
    blocks = Exact(window, num_merged=1).blocks
    return blocks.window + blocks.size
