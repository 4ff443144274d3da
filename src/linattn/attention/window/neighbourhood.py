"""Exact attention between neighbouring blocks of tokens; letters as in window/__init__.py, n blocks of a chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.softmax.attention import causal_mask, softmax_rows
from linattn.softmax.blocks import by_block, from_blocks, spans
from linattn.softmax.partial import Partial, joined
from linattn.softmax.tokens import Tokens

# Weights held at once.
_CHUNK = 2**22


def near(query: Tensor, tokens: Tokens, window: int, scale: float, *, is_causal: bool) -> Partial:
    """Softmax of rows (B, H, G, Lq, D) of the last of L tokens over their block and both neighbours, or causally.

    Time O(Lq·min(L, w)·(D + Dv)).
    """
    batch, heads, groups, _, _ = query.shape
    length = tokens.key.shape[2]
    first = length - query.shape[3]
    per_block = batch * heads * groups * window * window * (2 if is_causal else 3)
    parts = []
    for start, stop in spans(first, length, window, max(_CHUNK // max(per_block, 1), 1)):
        chunk = Chunk(start, stop, window, is_causal)
        rows = by_block(query[..., start - first : stop - first, :], chunk.num_blocks, chunk.num_rows)
        k, v, bias = chunk.around(tokens.key), chunk.around(tokens.value), chunk.bias(tokens.bias, groups)
        parts.append(from_blocks(softmax_rows(rows, k, v, bias, scale), groups, stop - start))
    return joined(parts)


class Chunk(NamedTuple):
    """Rows of consecutive whole blocks, or of a part of one, and the keys around them."""

    start: int
    stop: int
    window: int
    is_causal: bool

    @property
    def num_blocks(self) -> int:
        """0 without rows."""
        return -(-(self.stop - self.start) // self.window)

    @property
    def num_rows(self) -> int:
        """Of each block."""
        return min(self.stop - self.start, self.window)

    @property
    def sides(self) -> tuple[int, ...]:
        """Which blocks a query sees, counted from its own."""
        return (-1, 0) if self.is_causal else (-1, 0, 1)

    @property
    def ends(self) -> tuple[int, int]:
        """The first key that any row sees, and the one after the last; beyond the tokens' ends at the ends."""
        last = self.stop if self.is_causal else (-(-self.stop // self.window) + 1) * self.window
        return (self.start // self.window - 1) * self.window, last

    def around(self, x: Tensor, filling: float = 0.0) -> Tensor:
        """The tokens around each block, (B, H, L, ·) -> (B, H, n, K, ·), `filling` beyond the ends around several."""
        low, high = self.ends
        before, after = max(-low, 0), max(high - x.shape[2], 0)
        around = x[:, :, max(low, 0) : min(high, x.shape[2])]
        if self.num_blocks <= 1:
            return around.unsqueeze(2)
        if before or after:
            around = torch.nn.functional.pad(around, (0, 0, before, after), value=filling)
        blocks = around.unflatten(2, (-1, self.window))
        return torch.cat([blocks[:, :, 1 + side : 1 + side + self.num_blocks] for side in self.sides], 3)

    def bias(self, bias: Tensor, groups: int) -> Tensor:
        """Bias on the logits of a block's rows: (B or 1, H or 1, n, G·R or 1, K), -inf for unseen keys."""
        around = self.around(bias.unsqueeze(-1), -torch.inf).transpose(3, 4)
        if not self.is_causal or self.num_rows == 1:
            return around
        past = causal_mask(self.num_rows, around.shape[-1], bias.device)
        return around.masked_fill(~past.repeat(groups, 1), -torch.inf)
