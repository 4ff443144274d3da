"""Windows: the latest keys, and the first ones beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn_lab.contenders.contender import Contender

SINKS = 4
"""First tokens that most rules keep for ever: what attention falls back on."""

_CHUNK = 256


@dataclass(frozen=True)
class SinksAndWindow(Contender):
    """The first keys and the latest, a query's own among them; token by token."""

    num_keys: int
    num_sinks: int = SINKS

    kind = "sinks + window"
    source = "Xiao et al. 2023 (StreamingLLM, arXiv 2309.17453)"

    fewest: ClassVar[int] = SINKS + 1

    @property
    def num_held(self) -> int:
        """N."""
        return self.num_keys

    @property
    def label(self) -> str:
        """Its name with its sizes."""
        return f"sinks {self.num_sinks} + window {self.num_keys - self.num_sinks}"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        return cls(num_bytes // sizes.key_bytes)

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys and values."""
        return min(self.num_keys, num_tokens) * sizes.key_bytes

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Chunks of queries under a mask."""
        latest, length = self.num_keys - self.num_sinks, key.shape[2]
        parts = []
        for start in range(0, length, _CHUNK):
            stop = min(start + _CHUNK, length)
            place = torch.arange(length, device=key.device)
            seen = place[(place < stop) & ((place < self.num_sinks) | (place > start - latest))]
            rows = torch.arange(start, stop, device=key.device).unsqueeze(-1)
            visible = (seen <= rows) & ((seen < self.num_sinks) | (seen > rows - latest))
            parts.append(_masked(query[:, :, start:stop], key[:, :, seen], value[:, :, seen], visible, scale))
        return torch.cat(parts, 2)


def _masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax under a mask (n, K) of pairs."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scale, enable_gqa=True
    )
