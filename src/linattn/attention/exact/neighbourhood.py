"""Exact attention between neighbouring blocks of tokens; letters as in exact/__init__.py, n blocks of a chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.map_part import joined
from linattn.attention.partial import Partial
from linattn.attention.softmax import softmax_weights
from linattn.attention.sums import accumulation_dtype

# Weights held at once.
_CHUNK = 2**22


class Near(NamedTuple):
    """What `near` returns.

    Attributes:
        partial: (B, H, G, L, ·) over the keys of the neighbourhood.
        mass: how much the live queries attend to each key among those of their neighbourhood, (B, H, L); 0 unless asked
            for.
    """

    partial: Partial
    mass: Tensor


def near(
    query: Tensor,  # (B, H, G, L, D)
    key: Tensor,  # (B, H, L, D)
    value: Tensor,  # (B, H, L, Dv)
    bias: Tensor | None,  # (B, H or 1, L)
    *,
    window: int,
    scale: float,
    is_causal: bool,
    first: int | None = None,
) -> Near:
    """Softmax over a query's own block of tokens and the next ones on both sides; causal: up to itself and before.

    O(L·w·(D + Dv)) time. With `first`, the queries from it on carry mass.
    """
    batch, heads, groups, length, _ = query.shape
    per_block = batch * heads * groups * window * window * (2 if is_causal else 3)
    size = max(_CHUNK // max(per_block, 1), 1) * window
    parts, mass = [], None
    for start in range(0, max(length, 1), size):
        stop = min(start + size, length)
        chunk = _Chunk(start, stop, -(-(stop - start) // window), window, is_causal)
        out, log, weights = chunk.attend(query, key, value, bias, scale)
        # From the weights, which torch.vmap has mapped if it has mapped any input.
        mass = weights.new_zeros(batch, heads, length + 2 * window) if mass is None else mass
        if first is not None:
            places = torch.arange(start, start + chunk.num_blocks * window, device=key.device)
            live = ((places >= first) & (places < length)).view(-1, 1, window, 1)
            columns = torch.where(live, weights.detach().unflatten(3, (groups, window)), 0)
            chunk.add_columns(mass, columns.sum((3, 4)))
        parts.append(Partial(out, log))
    assert mass is not None  # one chunk at least
    return Near(joined(parts), mass[..., window : window + length])


class _Chunk(NamedTuple):
    """Consecutive blocks of queries and the keys around them."""

    start: int
    stop: int
    num_blocks: int
    window: int
    is_causal: bool

    @property
    def sides(self) -> tuple[int, ...]:
        """Which blocks a query sees, counted from its own."""
        return (-1, 0) if self.is_causal else (-1, 0, 1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Out (B, H, G, n·w, Dv), log-normaliser, and weights (B, H, n, G·w, K) that sum to 1."""
        groups, length = query.shape[2], self.stop - self.start
        rows = _padded(query[..., self.start : self.stop, :], 0, self.num_blocks * self.window - length)
        rows = rows.unflatten(3, (self.num_blocks, self.window)).transpose(2, 3).flatten(3, 4)
        k, v = self._context(key), self._context(value)
        weights, log = softmax_weights(rows, k, self._bias(key, bias, groups), scale)
        out = weights @ v.to(weights.dtype)
        out, log = (
            x.unflatten(3, (groups, self.window)).transpose(2, 3).flatten(3, 4)[:, :, :, :length] for x in (out, log)
        )
        return out.to(query.dtype), log, weights

    def add_columns(self, mass: Tensor, columns: Tensor) -> None:
        """Add the blocks' columns (B, H, n, K) to the keys' masses (B, H, w + L + w)."""
        for place, side in enumerate(self.sides):
            part = columns[..., place * self.window : (place + 1) * self.window].flatten(2, 3)
            first = self.start + (1 + side) * self.window
            room = min(part.shape[-1], mass.shape[-1] - first)
            mass[..., first : first + room] += part[..., :room]

    def _context(self, x: Tensor, filling: float = 0.0) -> Tensor:
        """The keys around each block, (B, H, L, ·) -> (B, H, n, K, ·), `filling` beyond the ends."""
        blocks = self._around(x, filling).unflatten(2, (-1, self.window))
        return torch.cat([blocks[:, :, 1 + side : 1 + side + self.num_blocks] for side in self.sides], 3)

    def _around(self, x: Tensor, filling: float) -> Tensor:
        """Tokens from a block before the chunk to a block after it."""
        low, high = self.start - self.window, self.start + (self.num_blocks + 1) * self.window
        inside = x.narrow(2, max(low, 0), min(high, x.shape[2]) - max(low, 0))
        return _padded(inside, max(-low, 0), max(high - x.shape[2], 0), filling)

    def _bias(self, key: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """What is added to the logits of a block's rows: (B or 1, H or 1, n, G·w or 1, K), -inf for unseen keys."""
        if bias is None:
            bias = key.new_zeros(1, 1, key.shape[2], dtype=accumulation_dtype(key.dtype))
        around = self._context(bias.unsqueeze(-1), -torch.inf).transpose(3, 4)
        if not self.is_causal:
            return around
        past = torch.ones(self.window, 2 * self.window, dtype=torch.bool, device=key.device).tril(self.window)
        return around.masked_fill(~past.repeat(groups, 1), -torch.inf)


def _padded(x: Tensor, before: int, after: int, filling: float = 0.0) -> Tensor:
    """`filling` before and after the tokens of (…, L, ·)."""
    return torch.nn.functional.pad(x, (0, 0, before, after), value=filling) if before or after else x
