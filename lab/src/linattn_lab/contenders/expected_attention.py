"""Expected Attention: what queries like the latest are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn_lab.contenders.eviction import Eviction, Held
from linattn_lab.contenders.query_moments import QueryMoments
from linattn_lab.contenders.windows import SINKS

# Share that a key's value has whatever its expected weight: the paper's.
_EPSILON = 0.02


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """Keys of the largest expected weight times the length of their value, for normally distributed queries.

        worth_j = (p_j + ε)·|v_j|,   p = softmax(μ·k + ½ kᵀΣk),   μ, Σ of the queries times the scale

    Queries are those after their position encoding, by running moments, where the paper rotates the mean and the
    covariance of unrotated ones to the next positions. A quarter of the room is for the latest keys.
    """

    kind = "Expected Attention"
    source = "Devoto et al. 2025 (arXiv 2510.00636)"
    judges_by_queries = True

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        count = cls.keys_within(num_bytes, sizes)
        return cls(count, num_recent=count // 4, num_sinks=SINKS)

    @classmethod
    def numbers_per_head(cls, sizes: Sizes) -> int:
        """Weight, mean and covariance of the queries."""
        return 1 + sizes.head_dim + sizes.head_dim**2

    def worth(self, held: Held, moments: QueryMoments, scale: float) -> Tensor:
        """Expected attention times the length of the value."""
        key = held.key.to(moments.mean.dtype)
        logits = (key @ moments.mean.unsqueeze(-1)).squeeze(-1) + 0.5 * ((key @ moments.covariance) * key).sum(-1)
        found: Tensor = (logits.softmax(-1) + _EPSILON) * held.value.to(logits.dtype).norm(dim=-1)
        return found
