"""MomentKV: what is evicted lives on in its moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from linattn.kv_cache.budget import Sizes
from linattn.softmax.attention import causal_mask
from linattn_lab.contenders.contender import Contender
from linattn_lab.contenders.eviction import BLOCK, Held
from linattn_lab.contenders.windows import SINKS


class _Moments(NamedTuple):
    """Of the evicted keys and values."""

    number: int
    key: Tensor  # (B, H, D), mean
    value: Tensor  # (B, H, Dv), mean
    covariance: Tensor  # (B, H, Dv, D), of values with keys

    def add(self, key: Tensor, value: Tensor) -> _Moments:
        """With more keys (B, H, n, D) and their values."""
        new = key.shape[2]
        number = self.number + new
        share = new / number
        new_key, new_value = key.mean(2), value.mean(2)
        inner = (value - new_value.unsqueeze(2)).mT @ (key - new_key.unsqueeze(2)) / new
        step_key, step_value = new_key - self.key, new_value - self.value
        between = (1 - share) * share * step_value.unsqueeze(-1) * step_key.unsqueeze(-2)
        covariance = (1 - share) * self.covariance + share * inner + between
        return _Moments(number, self.key + share * step_key, self.value + share * step_value, covariance)


@dataclass(frozen=True)
class MomentKV(Contender):
    """Keys that are held, and one more that stands for all evicted ones, to first order around the zero query.

        weight n·exp(q·k̄),   value v̄ + Cov(v, k) q,   over the n evicted keys

    Sinks and the latest half of the room are held. Of the others those are evicted first that received little attention
    and whose value points as the evicted ones' mean does: (attention received)·(1 - cos(v, v̄)). The paper's abstract
    says what its rule looks at; how the two are combined is our reading of it.
    """

    num_keys: int
    block: int = BLOCK

    kind = "MomentKV"
    source = "Li et al. 2026 (arXiv 2606.01563)"

    fewest: ClassVar[int] = 2 * BLOCK

    @property
    def num_held(self) -> int:
        """N."""
        return self.num_keys

    @property
    def label(self) -> str:
        """Its name with its size."""
        return f"{self.kind} {self.num_keys} + moments"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        return cls((num_bytes - cls._moment_bytes(sizes)) // (sizes.key_bytes + sizes.statistic_bytes))

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys, values, the attention they received, and the moments."""
        kept = min(self.num_keys, num_tokens)
        return kept * (sizes.key_bytes + sizes.statistic_bytes) + self._moment_bytes(sizes)

    @staticmethod
    def _moment_bytes(sizes: Sizes) -> int:
        """Count, two means and the covariance."""
        return (1 + sizes.head_dim + sizes.value_dim + sizes.head_dim * sizes.value_dim) * sizes.statistic_bytes

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Block by block: answer, then evict into the moments."""
        rows = query.unflatten(1, (key.shape[1], -1)) * scale
        dtype = torch.promote_types(key.dtype, torch.float32)
        zero_key, zero_value = key[:, :, :1].sum(2).to(dtype) * 0, value[:, :, :1].sum(2).to(dtype) * 0
        far = _Moments(0, zero_key, zero_value, zero_value.unsqueeze(-1) * zero_key.unsqueeze(-2))
        held, parts = Held.none(key.to(dtype), value.to(dtype)), []
        for start in range(0, key.shape[2], self.block):
            stop = min(start + self.block, key.shape[2])
            held = held.then(key[:, :, start:stop].to(dtype), value[:, :, start:stop].to(dtype), start)
            out, weights = self._read(rows[:, :, :, start:stop].to(dtype), held, far)
            parts.append(out.to(query.dtype))
            held = held._replace(mass=held.mass + weights.sum(3).mean(2))
            held, far = self._evicted(held, far, stop)
        return torch.cat(parts, 3).flatten(1, 2)

    def _read(self, rows: Tensor, held: Held, far: _Moments) -> tuple[Tensor, Tensor]:
        """Outputs (B, H, G, n, Dv) of rows, and their weights on held keys."""
        visible = causal_mask(rows.shape[3], held.key.shape[2], rows.device)
        logits = torch.where(visible, rows @ held.key.unsqueeze(2).mT, -torch.inf)
        if far.number == 0:
            weights = logits.softmax(-1)
            return weights @ held.value.unsqueeze(2), weights
        log_count = torch.tensor(float(far.number), dtype=rows.dtype).log()
        summary = (rows @ far.key[:, :, None, :, None]) + log_count
        weights = torch.cat((logits, summary), -1).softmax(-1)
        beyond = far.value[:, :, None, None] + rows @ far.covariance.unsqueeze(2).mT
        near = weights[..., :-1]
        return near @ held.value.unsqueeze(2) + weights[..., -1:] * beyond, near

    def _evicted(self, held: Held, far: _Moments, num_seen: int) -> tuple[Held, _Moments]:
        """The best N - block of them, and the moments with the others."""
        room = self.num_keys - self.block
        if held.key.shape[2] <= room:
            return held, far
        worth = held.mass
        if far.number:
            worth = worth * (1 - cosine_similarity(held.value, far.value.unsqueeze(2), dim=-1))
        safe = (held.position >= num_seen - self.num_keys // 2) | (held.position < SINKS)
        order = torch.where(safe, torch.inf, worth).argsort(dim=-1, descending=True)
        gone = held.pick(order[..., room:])
        return held.pick(order[..., :room].sort(dim=-1).values), far.add(gone.key, gone.value)
