"""A few of the queries, by whose attention keys are merged; letters as in kv_cache/__init__.py, S sampled queries.

In a stream they are the latest; where every key is in view they are evenly spaced, as many as each head's live tokens
alone say, however far its row is padded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kv_cache.partitioning import ALIKE, FARTHEST
from linattn.softmax.attention import Scoring
from linattn.softmax.extensions import is_readable
from linattn.softmax.tokens import Tokens, picked

# Queries that a block of tokens gives, where a group has no more heads.
_FEWEST = 8
# Blocks that a sample is of, where each gives as many.
_BLOCKS = 2
# In place of -inf, whose differences and derivatives are no numbers.
_NEVER = -1e30
# Logits held at once: few enough to stay in a processor's cache from one pass to the next.
_CHUNK = 2**19


class SampleAttention(NamedTuple):
    """Attention of sampled queries, in logarithms."""

    log_mass: Tensor  # (B, H, n), of Σ_s a_si of each key; -inf for absent ones
    query: Tensor  # (B, H, S, D), those that attend: at least one
    log_normalizer: Tensor  # (B, H, S), theirs; so large that those that are not there attend to nothing
    soft_cap: float | None  # on their logits


class QuerySample(NamedTuple):
    """Queries times the scale, per key/value head."""

    query: Tensor  # (B, H, S, D), at least float32; 0 where it is not there
    there: Tensor  # (B, H, S), false for these

    @classmethod
    def empty(cls, key: Tensor) -> QuerySample:
        """Of no queries, for keys like these (B, H, L, D)."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        query = key.new_zeros(*key.shape[:2], 0, key.shape[-1], dtype=dtype)
        return cls(query, torch.zeros(query.shape[:3], dtype=torch.bool, device=key.device))

    def add(self, query: Tensor, live: Tensor, scale: float, *, block: int, first: int) -> QuerySample:
        """With queries (B, H, G, n, D) of one block of tokens, from its token number `first` on; the oldest go."""
        groups, stop = query.shape[2], first + query.shape[3]
        places = [(token - first, head) for token, head in sampled_places(block, groups) if first <= token < stop]
        if not places:
            return self
        token, head = (torch.tensor(numbers, device=query.device) for numbers in zip(*places, strict=True))
        rows = query.transpose(2, 3).flatten(2, 3)[:, :, token * groups + head].to(self.query.dtype) * scale
        there = live.expand(*query.shape[:2], -1)[..., token] & _are_numbers(rows)
        rows = torch.where(there.unsqueeze(-1), rows, 0)
        size = sample_size(groups)
        # Copies: views would keep more than these in memory.
        sample = torch.cat((self.query, rows), 2)[:, :, -size:].clone()
        return QuerySample(sample, torch.cat((self.there, there), 2)[..., -size:].clone())

    def attends(self, tokens: Tokens, soft_cap: float | None = None) -> SampleAttention:
        """Attention of the sample to keys (B, H, n, ·); where none of it is there, to all alike. O(n·S·D)."""
        query, there = self
        if query.shape[2] == 0:
            query, there = query.new_zeros(*query.shape[:2], 1, query.shape[3]), there.new_zeros(*there.shape[:2], 1)
        # Those that are not there are 0.
        there = there | ~there.any(-1, keepdim=True)
        inputs = query, there, tokens.key, tokens.bias.clamp(min=_NEVER).unsqueeze(2)
        size, logs = max(_CHUNK // max(query.shape[2] * tokens.bias.shape[2], 1), 1), []
        for rows, seen, key, bias in zip(*(x.flatten(0, 1).split(size) for x in inputs), strict=True):
            logits = Scoring(1.0, soft_cap).biased(bias, rows, key.mT)
            log = torch.where(seen, logits.logsumexp(-1), -_NEVER)
            logs.append(((logits - log.unsqueeze(-1)).logsumexp(1), log))
        log_mass, log = (torch.cat(x).unflatten(0, query.shape[:2]) for x in zip(*logs, strict=True))
        return SampleAttention(torch.where(tokens.bias == -torch.inf, -torch.inf, log_mass), query, log, soft_cap)

    @property
    def power(self) -> Tensor:
        """Mean squares (B, H, D) of the coordinates; 1 where there are none."""
        number = self.there.sum(2).unsqueeze(-1)
        return torch.where(number == 0, 1, self.query.square().sum(2) / number.clamp(min=1))

    @property
    def spread(self) -> Tensor:
        """Standard deviations (B, H, D) of the coordinates; 1 where queries are all alike, or none."""
        there = self.there.unsqueeze(-1)
        number = there.sum(2, keepdim=True).clamp(min=1)
        mean = self.query.sum(2, keepdim=True) / number
        variance = torch.where(there, self.query - mean, 0).square().sum(2) / number.squeeze(2)
        return torch.where(variance.sum(-1, keepdim=True) <= ALIKE * mean.square().sum(-1), 1, variance).sqrt()


def _are_numbers(rows: Tensor) -> Tensor:
    """Whether queries and their squares are numbers: others would spoil every mass."""
    return (rows.abs() <= FARTHEST).all(-1)


def sample_size(num_groups: int) -> int:
    """S, the most queries that are kept."""
    return _BLOCKS * max(_FEWEST, num_groups)


def sampled_places(block: int, num_groups: int) -> list[tuple[int, int]]:
    """The tokens of a block whose query is kept, and of which head: evenly spaced, all heads in turn."""
    count = max(_FEWEST, num_groups)
    if block < count:
        return [(token, head) for token in range(block) for head in range(num_groups)]
    return [((n + 1) * (block // count) - 1, n % num_groups) for n in range(count)]


# Queries whose attention is the keys' mass: as many as keep their logits within these, and no fewer than that.
_SAMPLED, _LEAST_SAMPLED = 2**17, 64


def sampled_evenly(query: Tensor, live: Tensor, num_merged: int, scale: float, *, is_masked: bool) -> QuerySample:
    """Of queries (B, H, G, Lq, D), as many as their head's live keys (B, H, Lk) say; where Lq ≠ Lk all count."""
    groups, num_queries, num_keys = query.shape[2], query.shape[3], live.shape[-1]
    # No more keys than merged ones stay alone, by whatever sample.
    keys, is_same = live.sum(-1, keepdim=True).clamp(min=num_merged + 1), num_queries == num_keys
    live = live if is_same else live.new_ones(*live.shape[:2], num_queries)
    size = ((_SAMPLED // keys).clamp(min=_LEAST_SAMPLED) // groups).clamp(min=1)
    size = torch.minimum(size, live.sum(-1, keepdim=True))
    if not is_masked:
        room = min(_size(num_keys, groups), num_queries)
    elif is_readable(size):
        room = int(size.max()) if size.numel() else 0
    else:
        # Of so many tokens all queries are sampled, of more no more.
        most = math.isqrt(_SAMPLED // groups) if is_same else 0
        room = min(_size(max(num_merged + 1, most), groups), num_queries)
    index, there = evenly(live, size, max(room, 1))
    there = there.unsqueeze(-1).expand(-1, -1, -1, groups).flatten(2)
    rows = picked(query.movedim(2, 3).flatten(3), index).unflatten(-1, query.shape[2::2]).flatten(2, 3)
    rows = rows.to(torch.promote_types(query.dtype, torch.float32)) * scale
    there = there & _are_numbers(rows)
    return QuerySample(torch.where(there.unsqueeze(-1), rows, 0), there)


def _size(num_keys: int, groups: int) -> int:
    """How many queries of each of so many heads are sampled for so many keys, if there are as many."""
    return max(max(_SAMPLED // num_keys, _LEAST_SAMPLED) // groups, 1)


def evenly(live: Tensor, size: Tensor | int, room: int) -> tuple[Tensor, Tensor]:
    """Places (B, H, room) of so many live tokens (B, H, L), of each head or of all, evenly spaced; which are there."""
    reach = live.cumsum(-1)
    number = reach[..., -1:]
    size = number.clamp(max=size)
    step = torch.arange(room, device=live.device)
    place = torch.searchsorted(reach, step * number // size.clamp(min=1) + 1).clamp(max=live.shape[-1] - 1)
    return place, step < size
