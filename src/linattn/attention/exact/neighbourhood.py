"""Exact attention between neighbouring blocks of tokens; letters as in exact/__init__.py, n blocks of a chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.heavy import by_block, from_blocks
from linattn.attention.exact.keys import Tokens
from linattn.attention.partial import Partial, joined
from linattn.attention.softmax import softmax_weights

# Weights held at once.
_CHUNK = 2**22


def near(
    query: Tensor, tokens: Tokens, window: int, scale: float, *, is_causal: bool, first: int | None = None
) -> tuple[Partial, Tensor]:
    """Softmax of rows (B, H, G, L, D) over their block of tokens and both neighbours, causally up to themselves.

    Also the mass (B, H, L) that queries from `first` on give each key of their neighbourhood, 0 without `first`. Time
    O(L·w·(D + Dv)).
    """
    batch, heads, groups, length, _ = query.shape
    per_block = batch * heads * groups * window * window * (2 if is_causal else 3)
    size = max(_CHUNK // max(per_block, 1), 1) * window
    parts, mass = [], None
    for start in range(0, max(length, 1), size):
        stop = min(start + size, length)
        chunk = Chunk(start, -(-(stop - start) // window), window, is_causal)
        k, v = chunk.around(tokens.key), chunk.around(tokens.value)
        rows = by_block(query[..., start:stop, :], chunk.num_blocks, window)
        weights, log = softmax_weights(rows, k, chunk.bias(tokens.bias, groups), scale)
        out = (weights @ v.to(weights.dtype)).to(query.dtype)
        parts.append(from_blocks(Partial(out, log), groups, stop - start))
        # From the weights, which torch.vmap has mapped if it has mapped any input.
        mass = weights.new_zeros(batch, heads, length + 2 * window) if mass is None else mass
        if first is not None:
            places = torch.arange(start, start + chunk.num_blocks * window, device=query.device)
            live = ((places >= first) & (places < length)).view(-1, 1, window, 1)
            columns = torch.where(live, weights.detach().unflatten(3, (groups, window)), 0)
            chunk.add_columns(mass, columns.sum((3, 4)))
    assert mass is not None  # one chunk at least
    return joined(parts), mass[..., window : window + length]


class Chunk(NamedTuple):
    """Consecutive blocks of queries and the keys around them."""

    start: int
    num_blocks: int
    window: int
    is_causal: bool

    @property
    def sides(self) -> tuple[int, ...]:
        """Which blocks a query sees, counted from its own."""
        return (-1, 0) if self.is_causal else (-1, 0, 1)

    def add_columns(self, mass: Tensor, columns: Tensor) -> None:
        """Add the blocks' columns (B, H, n, K) to the keys' masses (B, H, w + L + w)."""
        for place, side in enumerate(self.sides):
            part = columns[..., place * self.window : (place + 1) * self.window].flatten(2, 3)
            first = self.start + (1 + side) * self.window
            room = min(part.shape[-1], mass.shape[-1] - first)
            mass[..., first : first + room] += part[..., :room]

    def around(self, x: Tensor, filling: float = 0.0) -> Tensor:
        """The tokens around each block, (B, H, L, ·) -> (B, H, n, K, ·), `filling` beyond the ends."""
        low, high = self.start - self.window, self.start + (self.num_blocks + 1) * self.window
        before, after = max(-low, 0), max(high - x.shape[2], 0)
        around = x.narrow(2, max(low, 0), min(high, x.shape[2]) - max(low, 0))
        if before or after:
            around = torch.nn.functional.pad(around, (0, 0, before, after), value=filling)
        blocks = around.unflatten(2, (-1, self.window))
        return torch.cat([blocks[:, :, 1 + side : 1 + side + self.num_blocks] for side in self.sides], 3)

    def bias(self, bias: Tensor, groups: int) -> Tensor:
        """What is added to the logits of a block's rows: (B or 1, H or 1, n, G·w or 1, K), -inf for unseen keys."""
        around = self.around(bias.unsqueeze(-1), -torch.inf).transpose(3, 4)
        if not self.is_causal:
            return around
        past = torch.ones(self.window, 2 * self.window, dtype=torch.bool, device=bias.device).tril(self.window)
        return around.masked_fill(~past.repeat(groups, 1), -torch.inf)
