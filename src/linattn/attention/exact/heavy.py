"""Attention to a few keys chosen for each block, and the choice as blocks leave; letters as in exact/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.keys import Tokens, picked
from linattn.attention.exact.rule import Exact
from linattn.attention.partial import Partial, joined
from linattn.attention.softmax import softmax_rows

# Weights held at once.
_CHUNK = 2**22


def attend_to_all(query: Tensor, tokens: Tokens, scale: float) -> Partial:
    """Exact rows (B, H, G, L, ·) over the same few tokens."""
    size = max(_CHUNK // max(query.shape[:3].numel() * tokens.key.shape[2], 1), 1)
    key, value, bias = tokens.key.unsqueeze(2), tokens.value.unsqueeze(2), tokens.bias[:, :, None, None]
    return joined([softmax_rows(rows, key, value, bias, scale) for rows in query.split(size, 3)])


def attend_by_block(query: Tensor, tokens: Tokens, index: Tensor, first: int, window: int, scale: float) -> Partial:
    """Exact rows (B, H, G, L, ·) from token `first` on, those of each block over tokens of its own, by number.

    The numbers (B, H, n, g) are those of the blocks from the first row's on.
    """
    groups, most = query.shape[2], max(_CHUNK // max(query.shape[:3].numel() * window * index.shape[-1], 1), 1)
    parts = []
    for start, stop in spans(first, first + query.shape[3], window, most):
        number, num_blocks = start // window - first // window, -(-(stop - start) // window)
        chosen = index[:, :, number : number + num_blocks]
        rows = by_block(query[:, :, :, start - first : stop - first], num_blocks, min(stop - start, window))
        k, v = (picked(x, chosen.flatten(2)).unflatten(2, chosen.shape[2:]) for x in tokens[:2])
        bias = torch.take_along_dim(tokens.bias, chosen.flatten(2), dim=2).view(chosen.shape).unsqueeze(3)
        parts.append(from_blocks(softmax_rows(rows, k, v, bias, scale), groups, stop - start))
    return joined(parts)


def spans(first: int, last: int, window: int, most: int) -> list[tuple[int, int]]:
    """Tokens from `first` to before `last`, cut: whole blocks, so many at most, or a part of one; one cut at least."""
    found, start = [], first
    while start < last:
        number = 0 if start % window else min((last - start) // window, most)
        stop = start + number * window if number else min((start // window + 1) * window, last)
        found.append((start, stop))
        start = stop
    return found or [(first, last)]


def by_block(rows: Tensor, num_blocks: int, window: int) -> Tensor:
    """Rows (B, H, G, L, D), L ≤ n·w, as the rows of blocks (B, H, n, G·w, D), zeros after the last."""
    short = num_blocks * window - rows.shape[3]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows
    blocks: Tensor = rows.unflatten(3, (num_blocks, window))
    return blocks.transpose(2, 3).flatten(3, 4)


def from_blocks(rows: Partial, groups: int, length: int) -> Partial:
    """Rows of blocks (B, H, n, G·w, ·) as `length` rows (B, H, G, L, ·)."""
    return Partial(*(x.unflatten(3, (groups, -1)).transpose(2, 3).flatten(3, 4)[:, :, :, :length] for x in rows))


class Schedule(NamedTuple):
    """Which keys are heavy for which block, and when the others are left to the map."""

    heavy: Tensor  # (B, H, 1 + n, g), those of each block of queries from the second on
    left: Tensor  # (B, H, n, w), those that stop being exact as each block of queries from the third on begins
    score: Tensor  # (B, H, g), of the last block's heavy keys


def schedule(
    rule: Exact,
    score: Tensor,  # (B, H, n·w), of the keys of the n blocks that leave; they are numbered from g on
    heavy_score: Tensor,  # (B, H, g), of the heavy keys so far; they are numbered from 0 on
) -> Schedule:
    """The running choice: as a block of keys leaves the neighbourhood, the g best of it and the heavy ones stay exact.

    A key that is dropped never returns, since the map's sums cannot be taken apart.
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
