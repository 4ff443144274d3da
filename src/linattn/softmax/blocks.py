"""Rows of tokens, block by block.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, n blocks of w tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.softmax.partial import Partial


def spans(first: int, last: int, window: int, most: int) -> list[tuple[int, int]]:
    """Tokens from `first` to before `last`, cut: whole blocks, so many at most, or a part of one; one cut at least."""
    cuts, start = [], first
    while start < last:
        number = 0 if start % window else min((last - start) // window, most)
        stop = start + number * window if number else min((start // window + 1) * window, last)
        cuts.append((start, stop))
        start = stop
    return cuts or [(first, last)]


def by_block(rows: Tensor, num_blocks: int, window: int) -> Tensor:
    """Rows (B, H, G, L, D), L ≤ n·w, as the rows of blocks (B, H, n, G·w, D), zeros after the last."""
    short = num_blocks * window - rows.shape[3]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows
    blocks: Tensor = rows.unflatten(3, (num_blocks, window))
    return blocks.transpose(2, 3).flatten(3, 4)


def from_blocks(rows: Partial, groups: int, length: int) -> Partial:
    """Rows of blocks (B, H, n, G·w, ·) as `length` rows (B, H, G, L, ·)."""
    return Partial(*(x.unflatten(3, (groups, -1)).transpose(2, 3).flatten(3, 4)[:, :, :, :length] for x in rows))
