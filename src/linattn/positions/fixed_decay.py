"""Decay at a fixed rate for each head: ALiBi's and RetNet's; letters as in positions/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor

from linattn.feature_maps._arguments import check_count
from linattn.positions.gates import Gate, Gates


@final
class FixedDecay(Gate):
    """Weights φ(q_i)·φ(k_j)·e^{-λ(i - j)}, λ fixed for each key/value head.

    A gate with log f = -λ: causal, O(1) memory in a stream, O(L) time.

    Args:
        rates: λ ≥ 0 of each key/value head, in nats per token.

    Raises:
        ValueError: no rate is given, or one is negative or not finite.

    Example:
        >>> import torch
        >>> FixedDecay.alibi(2)(torch.zeros(1, 3, 4)).log_forget[0, :, 0].tolist()
        [-0.0625, -0.00390625]

    Source: Press et al. 2022 (ALiBi, arXiv 2108.12409), section 3; Sun et al. 2023 (RetNet, arXiv 2307.08621),
        equation 8.
    """

    rates: Tensor

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        if not rates or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(f"rates must be finite numbers >= 0, one for each key/value head, got {list(rates)}")
        self.num_heads = len(rates)
        self.register_buffer("rates", torch.tensor(list(rates), dtype=torch.float64))

    @classmethod
    def alibi(cls, num_heads: int) -> Self:
        """ALiBi's slopes: 2^(-8h/H) for h = 1…H, H a power of two; else those of the next lower one and every second
        of its double's.
        """
        lower = 2 ** int(math.log2(check_count("num_heads", num_heads)))
        slopes = [2.0 ** (-8 * h / lower) for h in range(1, lower + 1)]
        between = [2.0 ** (-4 * h / lower) for h in range(1, 2 * (num_heads - lower), 2)]
        return cls(slopes + between)

    @classmethod
    def retnet(cls, num_heads: int) -> Self:
        """RetNet's decays: γ = 1 - 2^(-5-h) for h = 0…H-1."""
        return cls([-math.log1p(-(2.0 ** (-5 - h))) for h in range(check_count("num_heads", num_heads))])

    def forward(self, x: Tensor) -> Gates:
        """log f = -λ at every token of (B, L, E); (1, Hkv, L)."""
        return Gates(-self.rates[None, :, None].expand(-1, -1, x.shape[1]))

    def extra_repr(self) -> str:
        """The rates."""
        return f"{self.rates.tolist()}"
