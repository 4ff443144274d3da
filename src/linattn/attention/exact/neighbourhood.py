"""Exact attention between neighbouring blocks of tokens; letters as in exact/__init__.py, n blocks of a chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.heavy import by_block, from_blocks, spans
from linattn.attention.exact.keys import Tokens
from linattn.attention.partial import Partial, joined
from linattn.attention.softmax import causal_mask, softmax_weights

# Weights held at once.
_CHUNK = 2**22


def near(
    query: Tensor, tokens: Tokens, window: int, scale: float, *, is_causal: bool, with_mass: bool = False
) -> tuple[Partial, Tensor | None]:
    """Softmax of rows (B, H, G, Lq, D) of the last of L tokens over their block and both neighbours, or causally.

    Also the mass (B, H, L) that the rows give each key of their neighbourhood, where it is asked for. Time
    O(Lq·min(L, w)·(D + Dv)).
    """
    batch, heads, groups, _, _ = query.shape
    length = tokens.key.shape[2]
    first = length - query.shape[3]
    per_block = batch * heads * groups * window * window * (2 if is_causal else 3)
    parts, mass = [], None
    for start, stop in spans(first, length, window, max(_CHUNK // max(per_block, 1), 1)):
        chunk = Chunk(start, stop, window, is_causal)
        k, v = chunk.around(tokens.key), chunk.around(tokens.value)
        rows = by_block(query[..., start - first : stop - first, :], chunk.num_blocks, chunk.num_rows)
        weights, log = softmax_weights(rows, k, chunk.bias(tokens.bias, groups), scale)
        out = (weights @ v.to(weights.dtype)).to(query.dtype)
        parts.append(from_blocks(Partial(out, log), groups, stop - start))
        if with_mass:
            # From the weights, which torch.vmap has mapped if it has mapped any input.
            mass = weights.new_zeros(batch, heads, length) if mass is None else mass
            chunk.add_columns(mass, weights.detach().sum(3))
    return joined(parts), mass


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

    def add_columns(self, mass: Tensor, columns: Tensor) -> None:
        """Add the blocks' columns (B, H, n, K) to the keys' masses (B, H, L)."""
        low, _ = self.ends
        if self.num_blocks <= 1:
            first = max(low, 0)
            mass[..., first : first + columns.shape[-1]] += columns.sum(2)
            return
        for place in range(len(self.sides)):
            first = low + place * self.window
            part = columns[..., place * self.window : (place + 1) * self.window].flatten(2, 3)
            inside = part[..., max(-first, 0) : mass.shape[-1] - first]
            mass[..., max(first, 0) : max(first, 0) + inside.shape[-1]] += inside

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
        """What is added to the logits of a block's rows: (B or 1, H or 1, n, G·R or 1, K), -inf for unseen keys."""
        around = self.around(bias.unsqueeze(-1), -torch.inf).transpose(3, 4)
        if not self.is_causal or self.num_rows == 1:
            return around
        past = causal_mask(self.num_rows, around.shape[-1], bias.device)
        return around.masked_fill(~past.repeat(groups, 1), -torch.inf)
