"""Attention to a few keys chosen for each block, and the choice as blocks leave; letters as in exact/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.keys import Tokens, picked
from linattn.attention.exact.map_part import joined
from linattn.attention.exact.rule import Exact
from linattn.attention.partial import Partial
from linattn.attention.softmax import softmax_weights

# Weights held at once.
_CHUNK = 2**22


def attend_to_all(query: Tensor, tokens: Tokens, scale: float) -> Partial:
    """Exact rows (B, H, G, L, ·) over the same few tokens."""
    size = max(_CHUNK // max(query.shape[:3].numel() * tokens.key.shape[2], 1), 1)
    key, value, bias = tokens.key.unsqueeze(2), tokens.value.unsqueeze(2), tokens.bias[:, :, None, None]
    parts = []
    for rows in query.split(size, 3):
        weights, log = softmax_weights(rows, key, bias, scale)
        parts.append(Partial((weights @ value.to(weights.dtype)).to(query.dtype), log))
    return joined(parts)


def attend_by_block(query: Tensor, tokens: Tokens, index: Tensor, window: int, scale: float) -> Partial:
    """Exact rows (B, H, G, n·w, ·), those of each block over tokens of its own, by number (B, H, n, g).

    The last block may be shorter.
    """
    groups = query.shape[2]
    per_block = query.shape[:3].numel() * window * index.shape[-1]
    size, parts = max(_CHUNK // max(per_block, 1), 1), []
    for number, rows in enumerate(query.split(size * window, 3)):
        chosen, length = index[:, :, number * size : (number + 1) * size], rows.shape[3]
        rows = by_block(rows, chosen.shape[2], window)
        k, v = (picked(x, chosen.flatten(2)).unflatten(2, chosen.shape[2:]) for x in tokens[:2])
        bias = torch.take_along_dim(tokens.bias, chosen.flatten(2), dim=2).view(chosen.shape).unsqueeze(3)
        weights, log = softmax_weights(rows, k, bias, scale)
        parts.append(from_blocks(weights @ v.to(weights.dtype), log, groups, length, query.dtype))
    return joined(parts)


def by_block(rows: Tensor, num_blocks: int, window: int) -> Tensor:
    """Rows (B, H, G, L, D), L ≤ n·w, as the rows of blocks (B, H, n, G·w, D), zeros after the last."""
    short = num_blocks * window - rows.shape[3]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows
    blocks: Tensor = rows.unflatten(3, (num_blocks, window))
    return blocks.transpose(2, 3).flatten(3, 4)


def from_blocks(out: Tensor, log: Tensor, groups: int, length: int, dtype: torch.dtype) -> Partial:
    """Outputs (B, H, n, G·w, Dv) and log-normalisers of blocks as those of `length` rows, (B, H, G, L, ·)."""
    out, log = (x.unflatten(3, (groups, -1)).transpose(2, 3).flatten(3, 4)[:, :, :, :length] for x in (out, log))
    return Partial(out.to(dtype), log)


class Schedule(NamedTuple):
    """Which keys are heavy for which block, and when the others are left to the map.

    Attributes:
        heavy: the heavy keys of each block of queries from the second on, (B, H, 1 + n, g).
        left: the keys that stop being exact as each block of queries from the third on begins, (B, H, n, w).
        score: those of the last block's heavy keys, (B, H, g).
    """

    heavy: Tensor
    left: Tensor
    score: Tensor


def schedule(rule: Exact, score: Tensor, heavy_score: Tensor) -> Schedule:
    """The running choice: as a block of keys leaves the neighbourhood, the g best of it and the heavy ones stay exact.

    A key that is dropped never returns, since the map's sums cannot be taken apart.

    Args:
        rule: ranks the keys.
        score: (B, H, n·w), of the keys of the n blocks that leave; they are numbered from g on.
        heavy_score: (B, H, g), of the heavy keys so far; they are numbered from 0 on.
    """
    window, num_heavy = rule.window or 0, heavy_score.shape[-1]
    heavy = torch.arange(num_heavy, device=score.device).expand(heavy_score.shape)
    kept, left = [heavy], []
    for number in range(score.shape[-1] // window):
        own = score[..., number * window : (number + 1) * window]
        leaving = torch.arange(window, device=score.device).expand(own.shape) + num_heavy + number * window
        candidates, values = torch.cat((heavy, leaving), -1), torch.cat((heavy_score, own), -1)
        order = rule.rank(values)
        candidates, values = candidates.gather(-1, order), values.gather(-1, order)
        heavy, heavy_score = candidates[..., :num_heavy], values[..., :num_heavy]
        kept.append(heavy)
        left.append(candidates[..., num_heavy:])
    nobody = heavy.new_zeros(*heavy.shape[:2], 0, window)
    return Schedule(torch.stack(kept, 2), torch.stack(left, 2) if left else nobody, heavy_score)
