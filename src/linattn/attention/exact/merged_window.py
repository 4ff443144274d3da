"""Clusters of keys read without those that a block of queries sees as they are; letters as in exact/__init__.py.

A member has its share of its cluster's weight: a block reads the cluster with the shares that its neighbours leave, at
the place where all members put it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.exact.heavy import by_block
from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.neighbourhood import Chunk
from linattn.attention.exact.partitioning import sums
from linattn.attention.exact.weighted_reading import Reading, read

# Numbers of keys and values copied at once.
_CHUNK = 2**22


def read_beside_neighbours(
    query: Tensor,  # (B, H, G, L, D)
    tokens: Tokens,  # (B, H, L, ·)
    clusters: Tokens,  # (B, H, C, ·)
    number: Tensor,  # (B, H, L), of each key's cluster
    share: Tensor,  # (B, H, L), of each key in its cluster
    window: int,
    scale: float,
    *,
    with_log: bool,
) -> Reading:
    """Rows over their own block of keys and both neighbours as they are, and over what they leave of the clusters."""
    groups, length = query.shape[2:4]
    per_block = query.shape[:2].numel() * (clusters.bias.shape[2] + 3 * window) * 2 * query.shape[-1]
    size = max(_CHUNK // max(per_block, 1), 1) * window
    alone = sums(torch.ones_like(share).flatten(0, 1).unsqueeze(-1), number.flatten(0, 1), clusters.bias.shape[2])
    members, parts = alone.view_as(clusters.bias), []
    for start in range(0, length, size):
        stop = min(start + size, length)
        chunk = Chunk(start, -(-(stop - start) // window), window, is_causal=False)
        near = Tokens(chunk.around(tokens.key), chunk.around(tokens.value), _around(chunk, tokens.bias, -torch.inf))
        left = _left(clusters, members, near, _around(chunk, number, clusters.bias.shape[2]), _around(chunk, share, 0))
        seen = Tokens(*(torch.cat(pair, 3).transpose(1, 2).flatten(0, 1) for pair in zip(left, near, strict=True)))
        # Blocks as rows of a batch, G·w queries of one head each.
        rows = by_block(query[..., start:stop, :], chunk.num_blocks, window).transpose(1, 2).flatten(0, 1).unsqueeze(2)
        part = read(rows, seen, scale, is_causal=False, with_log=with_log)
        out, log = (x if x is None else _rows(x, chunk.num_blocks, groups, stop - start) for x in part)
        assert out is not None
        parts.append(Reading(out, log))
    return Reading.joined(parts)


def _around(chunk: Chunk, x: Tensor, filling: float) -> Tensor:
    """Of the tokens around each block, (B, H, L) -> (B, H, n, K)."""
    return chunk.around(x.unsqueeze(-1), filling).squeeze(-1)


def _left(clusters: Tokens, members: Tensor, near: Tokens, number: Tensor, share: Tensor) -> Tokens:
    """What neighbours (B, H, n, K, ·) leave of the clusters for each block, (B, H, n, C, ·).

    A remainder of which most digits are lost is left out.
    """
    size = clusters.bias.shape[2]
    rows = torch.cat((share.unsqueeze(-1) * near.value, share.unsqueeze(-1), torch.ones_like(share).unsqueeze(-1)), -1)
    gone = sums(rows.flatten(0, 2), number.flatten(0, 2), size).unflatten(0, number.shape[:3])
    value, remainder, count = gone.split((near.value.shape[-1], 1, 1), -1)
    remainder, value = 1 - remainder, clusters.value.unsqueeze(2) - value
    faint = (remainder < torch.finfo(share.dtype).eps ** 0.5) | (count == members[:, :, None, :, None])
    safe = torch.where(faint, 1, remainder)
    bias = torch.where(faint, -torch.inf, clusters.bias[:, :, None, :, None] + safe.log()).squeeze(-1)
    key = clusters.key.unsqueeze(2).expand(*bias.shape, -1)
    return Tokens(key, value / safe, bias)


def _rows(x: Tensor, num_blocks: int, groups: int, length: int) -> Tensor:
    """Rows of blocks (B·n, H, 1, G·w, …) as rows (B, H, G, L, …)."""
    blocks: Tensor = x.squeeze(2).unflatten(0, (-1, num_blocks)).transpose(1, 2).unflatten(3, (groups, -1))
    return blocks.transpose(2, 3).flatten(3, 4)[:, :, :, :length]
