"""Heavy keys: those much attended to, chosen by estimate and attended to exactly; letters as in exact/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.map_part import joined
from linattn.attention.partial import Partial
from linattn.attention.softmax import softmax_weights

# Weights held at once.
_CHUNK = 2**22


def picked(x: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, H, L, ·) by number (B, H, n)."""
    return torch.take_along_dim(x, index.unsqueeze(-1), dim=2)


def heaviest(mass: Tensor, bias: Tensor | None, num_heavy: int) -> Tensor:
    """The keys (B, H, g) of the largest mass (B, H, L) among those that may be seen, where there are so many."""
    mass = mass if bias is None else mass.masked_fill(bias == -torch.inf, -torch.inf)
    return mass.topk(min(num_heavy, mass.shape[-1]), dim=-1).indices


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Partial:
    """Exact rows (B, H, G, L, ·) over the same few keys (B, H, g, ·) of biases (B, H, g)."""
    size = max(_CHUNK // max(query.shape[:3].numel() * key.shape[2], 1), 1)
    parts = []
    for rows in query.split(size, 3):
        weights, log = softmax_weights(rows, key.unsqueeze(2), bias[:, :, None, None], scale)
        parts.append(Partial((weights @ value.unsqueeze(2).to(weights.dtype)).to(query.dtype), log))
    return joined(parts)


def attend_by_block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, index: Tensor, window: int, scale: float
) -> Partial:
    """Exact rows (B, H, G, n·w, ·), those of each block over keys of its own, by number (B, H, n, g) among
    (B, H, K, ·). The last block may be shorter.
    """
    groups = query.shape[2]
    per_block = query.shape[:3].numel() * window * index.shape[-1]
    size, parts = max(_CHUNK // max(per_block, 1), 1), []
    for number, rows in enumerate(query.split(size * window, 3)):
        chosen, length = index[:, :, number * size : (number + 1) * size], rows.shape[3]
        short = chosen.shape[2] * window - length
        rows = torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows
        rows = rows.unflatten(3, (-1, window)).transpose(2, 3).flatten(3, 4)
        k, v = (picked(x, chosen.flatten(2)).unflatten(2, chosen.shape[2:]) for x in (key, value))
        rise = torch.take_along_dim(bias, chosen.flatten(2), dim=2).view(chosen.shape).unsqueeze(3)
        weights, log = softmax_weights(rows, k, rise, scale)
        out = weights @ v.to(weights.dtype)
        out, log = (
            x.unflatten(3, (groups, window)).transpose(2, 3).flatten(3, 4)[:, :, :, :length] for x in (out, log)
        )
        parts.append(Partial(out.to(query.dtype), log))
    return joined(parts)


class Schedule(NamedTuple):
    """Who is heavy when, and when the others are left to the map.

    Attributes:
        heavy: the heavy keys of each block of queries from the second on, (B, H, 1 + n, g).
        left: the keys that stop being exact as each block of queries from the third on begins, (B, H, n, w).
        score: those of the last block's heavy keys, (B, H, g).
    """

    heavy: Tensor
    left: Tensor
    score: Tensor


def schedule(score: Tensor, heavy_score: Tensor, window: int) -> Schedule:
    """The running choice: as a block of keys leaves the neighbourhood, the g best of it and the heavy ones stay exact.

    A key that is dropped never returns, since the map's sums cannot be taken apart; ties keep the older.

    Args:
        score: (B, H, n·w), of the keys of the n blocks that leave; they are numbered from g on.
        heavy_score: (B, H, g), of the heavy keys so far; they are numbered from 0 on.
        window: w.
    """
    num_heavy = heavy_score.shape[-1]
    heavy = torch.arange(num_heavy, device=score.device).expand(heavy_score.shape)
    kept, left = [heavy], []
    for number in range(score.shape[-1] // window):
        own = score[..., number * window : (number + 1) * window]
        leaving = torch.arange(window, device=score.device).expand(own.shape) + num_heavy + number * window
        candidates, values = torch.cat((heavy, leaving), -1), torch.cat((heavy_score, own), -1)
        order = values.argsort(dim=-1, descending=True, stable=True)
        candidates, values = candidates.gather(-1, order), values.gather(-1, order)
        heavy, heavy_score = candidates[..., :num_heavy], values[..., :num_heavy]
        kept.append(heavy)
        left.append(candidates[..., num_heavy:])
    nobody = heavy.new_zeros(*heavy.shape[:2], 0, window)
    return Schedule(torch.stack(kept, 2), torch.stack(left, 2) if left else nobody, heavy_score)
