"""A sample of the queries where every key is in view, evenly spaced; letters as in kv_cache/__init__.py.

How large it is depends on each head's live tokens alone, however far its row is padded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linattn.kv_cache.query_sample import QuerySample
from linattn.softmax.compiled_code import is_readable
from linattn.softmax.tokens import picked

# Queries whose attention is the keys' mass: as many as keep their logits within these, and no fewer than that.
_SAMPLED, _FEWEST = 2**17, 64


def sampled_evenly(query: Tensor, live: Tensor, num_merged: int, scale: float, *, is_masked: bool) -> QuerySample:
    """Of queries (B, H, G, Lq, D), as many as the live keys (B, H, Lk) of their head say.

    As many queries as keys are the same tokens, and a masked one's query counts as little as its key; of another number
    all queries count.
    """
    groups, num_queries, num_keys = query.shape[2], query.shape[3], live.shape[-1]
    # No more keys than merged ones stay alone, by whatever sample.
    keys, is_same = live.sum(-1, keepdim=True).clamp(min=num_merged + 1), num_queries == num_keys
    live = live if is_same else live.new_ones(*live.shape[:2], num_queries)
    size = ((_SAMPLED // keys).clamp(min=_FEWEST) // groups).clamp(min=1)
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
    return QuerySample(torch.where(there.unsqueeze(-1), rows, 0), there)


def _size(num_keys: int, groups: int) -> int:
    """How many queries of each of so many heads are sampled for so many keys, if there are as many."""
    return max(max(_SAMPLED // num_keys, _FEWEST) // groups, 1)


def evenly(live: Tensor, size: Tensor | int, room: int) -> tuple[Tensor, Tensor]:
    """Places (B, H, room) of so many live tokens (B, H, L), evenly spaced, and which are there: each once of few.

    The size is one for each head, (B, H, 1), or for all, and no larger than `room`.
    """
    reach = live.cumsum(-1)
    number = reach[..., -1:]
    size = number.clamp(max=size)
    step = torch.arange(room, device=live.device)
    place = torch.searchsorted(reach, step * number // size.clamp(min=1) + 1).clamp(max=live.shape[-1] - 1)
    return place, step < size
