"""Rules of eviction: which keys of a stream are held, decided after every block; letters as in __init__.py.

At most N keys are held while a block of queries is answered, the block's own among them: after each block all but the
N - block best are evicted. Papers evict after every token, which is a block of one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn.softmax.attention import causal_mask, softmax_weights
from linattn.softmax.tokens import picked
from linattn_lab.contenders.contender import Contender
from linattn_lab.contenders.query_moments import QueryMoments

BLOCK = 16
"""Tokens between two evictions."""


class Held(NamedTuple):
    """The keys that are held, oldest first, and what rules judge them by."""

    key: Tensor  # (B, H, n, D)
    value: Tensor  # (B, H, n, Dv)
    position: Tensor  # (B, H, n), in the text
    mass: Tensor  # (B, H, n), attention received so far, summed over queries, mean over the group
    latest: Tensor  # (B, H, n), attention of the latest query, mean over the group

    def then(self, key: Tensor, value: Tensor, start: int) -> Held:
        """These and the keys of a block that begins at a position."""
        position = torch.arange(start, start + key.shape[2], device=key.device).expand(key.shape[:3])
        none = key.new_zeros(key.shape[:3], dtype=self.mass.dtype)
        return Held(*(torch.cat(x, 2) for x in zip(self, (key, value, position, none, none), strict=True)))

    def pick(self, index: Tensor) -> Held:
        """Those of the numbers (B, H, n)."""
        rest = (x.gather(-1, index) for x in (self.position, self.mass, self.latest))
        return Held(picked(self.key, index), picked(self.value, index), *rest)

    @classmethod
    def none(cls, key: Tensor, value: Tensor) -> Held:
        """No keys, of tokens like these."""
        empty = key.new_zeros(*key.shape[:2], 0, dtype=torch.promote_types(key.dtype, torch.float32))
        return cls(key[:, :, :0], value[:, :, :0], empty.long(), empty, empty)


@dataclass(frozen=True)
class Eviction(Contender):
    """A rule that keeps the keys worth most.

    Attributes:
        num_keys: N, held at most.
        num_recent: the latest keys, which are not evicted; the rule says how many its paper keeps.
        num_sinks: first keys, which are not evicted.
        block: tokens between two evictions.
    """

    num_keys: int
    num_recent: int = 0
    num_sinks: int = 0
    block: int = BLOCK

    judges_by_queries: ClassVar[bool] = False
    """Whether running moments of the queries are kept."""

    fewest: ClassVar[int] = 2 * BLOCK

    @property
    def num_held(self) -> int:
        """N."""
        return self.num_keys

    @property
    def label(self) -> str:
        """Its name with its sizes."""
        parts = [f"{self.kind} {self.num_keys}"]
        parts += [f"sinks {self.num_sinks}"] if self.num_sinks else []
        parts += [f"latest {self.num_recent}"] if self.num_recent else []
        return f"{parts[0]} ({', '.join(parts[1:])})" if parts[1:] else parts[0]

    @classmethod
    def numbers_per_key(cls) -> int:
        """Numbers kept with each key beside itself and its value."""
        return 0

    @classmethod
    def numbers_per_head(cls, sizes: Sizes) -> int:
        """Numbers kept of all queries or keys together."""
        return 0

    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Keys, values, and what the rule keeps to judge them by."""
        each = sizes.key_bytes + self.numbers_per_key() * sizes.statistic_bytes
        return min(self.num_keys, num_tokens) * each + self.numbers_per_head(sizes) * sizes.statistic_bytes

    @classmethod
    def keys_within(cls, num_bytes: int, sizes: Sizes) -> int:
        """How many keys so many bytes hold, what the rule keeps beside them included."""
        each = sizes.key_bytes + cls.numbers_per_key() * sizes.statistic_bytes
        return (num_bytes - cls.numbers_per_head(sizes) * sizes.statistic_bytes) // each

    @abstractmethod
    def worth(self, held: Held, moments: QueryMoments, scale: float) -> Tensor:
        """What keys are worth, (B, H, n); the least are evicted. `moments` are of the queries times the scale."""

    def bias(self, held: Held, num_seen: int) -> Tensor | None:
        """What is added to the logits of held keys, (B, H, n); None for nothing."""
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Block by block: answer, then evict."""
        rows = query.unflatten(1, (key.shape[1], -1))
        held, moments, parts = Held.none(key, value), QueryMoments.empty(key), []
        for start in range(0, key.shape[2], self.block):
            stop = min(start + self.block, key.shape[2])
            block = rows[:, :, :, start:stop]
            held = held.then(key[:, :, start:stop], value[:, :, start:stop], start)
            weights = self._weights(block, held, scale, start)
            parts.append((weights @ held.value.to(weights.dtype).unsqueeze(2)).to(query.dtype))
            held = held._replace(mass=held.mass + weights.sum(3).mean(2), latest=weights[:, :, :, -1].mean(2))
            if self.judges_by_queries:
                moments = moments.add(block, scale)
            held = self._evicted(held, moments, scale, stop)
        return torch.cat(parts, 3).flatten(1, 2)

    def _weights(self, block: Tensor, held: Held, scale: float, num_seen: int) -> Tensor:
        """(B, H, G, n of the block, n held)."""
        visible = causal_mask(block.shape[3], held.key.shape[2], block.device)
        logits = torch.where(visible, 0.0, -torch.inf).to(held.mass.dtype)
        bias = self.bias(held, num_seen)
        logits = logits if bias is None else logits + bias[:, :, None, None]
        weights, _ = softmax_weights(block, held.key.unsqueeze(2), logits, scale)
        return weights

    def _evicted(self, held: Held, moments: QueryMoments, scale: float, num_seen: int) -> Held:
        """The best N - block of them, oldest first."""
        room = self.num_keys - self.block
        if held.key.shape[2] <= room:
            return held
        worth = self.worth(held, moments, scale)
        safe = (held.position >= num_seen - self.num_recent) | (held.position < self.num_sinks)
        best = torch.where(safe, torch.inf, worth).topk(room, dim=-1).indices
        return held.pick(best.sort(dim=-1).values)
