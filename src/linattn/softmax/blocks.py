"""Rows of tokens, block by block.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, n blocks of w tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_block(rows: Tensor, num_blocks: int, window: int) -> Tensor:
    """Rows (B, H, G, L, D), L ≤ n·w, as the rows of blocks (B, H, n, G·w, D), zeros after the last."""
    short = num_blocks * window - rows.shape[3]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows
    blocks: Tensor = rows.unflatten(3, (num_blocks, window))
    return blocks.transpose(2, 3).flatten(3, 4)
