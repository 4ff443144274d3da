"""Clusters of keys read without those that a block of queries sees as they are; letters as in kv_cache/__init__.py.

A member has its share of its cluster's weight, and a row takes it back for each key that it sees as it is. Here N heads
of all rows of a batch, n blocks, R rows of a block, K keys around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.softmax.attention import Reading, Scoring
from linattn.softmax.partial import Partial
from linattn.softmax.precision import LOG2_E
from linattn.softmax.tokens import Tokens, by_block
from linattn.softmax.tracing import is_followed

# Weights held at once: few enough to stay in a processor's cache from one pass to the next.
_CHUNK = 2**19


class _Sources(NamedTuple):
    """Keys, clusters and shares that the rows of some heads are read from."""

    near: Tokens  # (N, L, ·)
    number: Tensor  # (N, L), of each key's cluster, any of an absent one's
    share: Tensor  # (N, L), of each key in its cluster, 0 of absent ones
    clusters: Tokens  # (N, C, ·), the biases (N, C, n) for each block

    def cut(self, heads: slice, start: int, num_blocks: int, window: int) -> _Sources:
        """Sources of some heads for consecutive blocks: `near` is (N, n, K, ·) then."""
        blocks = slice(start // window, start // window + num_blocks)

        def around(x: Tensor, filling: float = 0.0) -> Tensor:
            """Of the tokens around each block."""
            low, high = start - window, start + (num_blocks + 1) * window
            inside = x[heads, max(low, 0) : high]
            before, after = max(-low, 0), max(high - x.shape[1], 0)
            if before or after:
                inside = torch.nn.functional.pad(inside, (0, 0, before, after), value=filling)
            return inside.unfold(1, 3 * window, window).mT

        bias, number, share = (x.unsqueeze(-1) for x in (self.near.bias, self.number, self.share))
        near = Tokens(around(self.near.key), around(self.near.value), around(bias, -torch.inf))
        few = Tokens(self.clusters.key[heads], self.clusters.value[heads], self.clusters.bias[heads, :, blocks])
        return _Sources(near, around(number).squeeze(-1), around(share), few)


def read_beside_neighbours(
    query: Tensor,  # (B, H, G, L, D)
    tokens: Tokens,  # (B, H, L, ·)
    clusters: Tokens,  # (B, H, C, ·)
    number: Tensor,  # (B, H, L), of each key's cluster
    share: Tensor,  # (B, H, L), of each key in its cluster
    window: int,
    scoring: Scoring,
    *,
    with_log: bool,
) -> Reading:
    """Rows over their own block of keys and both neighbours as they are, and over what they leave of the clusters."""
    # One softmax: of Σ_c exp(q·k_c + β_c)·v_c + Σ_near (exp(q·k_j) - s_j·exp(q·k_c(j) + β_c(j)))·v_j.
    flat, few = (Tokens(*(x.flatten(0, 1) for x in each)) for each in (tokens, clusters))
    number, share = number.flatten(0, 1), share.flatten(0, 1)
    # In powers of two, of which a CPU takes twice as many in a second as of e.
    flat, few = flat._replace(bias=flat.bias * LOG2_E), few._replace(bias=few.bias * LOG2_E)
    few = few._replace(bias=_left(few.bias, number, share, window))
    sources = _Sources(flat, number.clamp(max=few.key.shape[1] - 1), share, few)
    scoring = Scoring(scoring.scale * LOG2_E, scoring.soft_cap and scoring.soft_cap * LOG2_E)
    parts = _together(_in_turn(query, sources, window, scoring), query.shape[:2].numel() * few.bias.shape[-1])
    out, log = (_rows(x, query, few.bias.shape[-1]) for x in parts)
    return Reading(out, log if with_log else None)


def _in_turn(query: Tensor, sources: _Sources, window: int, scoring: Scoring) -> Iterator[Partial]:
    """The rows of blocks (n, R, ·), of one head after the other: of whole heads at once, or of blocks of one."""
    groups, length = query.shape[2:4]
    num_clusters, num_blocks = sources.clusters.bias.shape[1:]
    per_row = num_clusters + 3 * window
    per_block = groups * window * per_row
    num_heads = max(_CHUNK // (per_block * num_blocks), 1)
    span = (num_blocks if num_heads > 1 else max(_CHUNK // per_block, 1)) * window
    rows = query.flatten(0, 1).unsqueeze(0)
    for first in range(0, max(rows.shape[1], 1), num_heads):
        for start in range(0, length, span):
            heads = slice(first, first + num_heads)
            head_rows = rows[:, heads, :, start : start + span]
            blocks = by_block(head_rows, -(-head_rows.shape[3] // window), window)[0]
            some = sources.cut(heads, start, blocks.shape[1], window)
            parts = [_read(x, some, scoring) for x in blocks.split(max(_CHUNK // per_row, 1), 2)]
            if len(parts) > 1:
                parts = [Partial(*(torch.cat(pieces, 2) for pieces in zip(*parts, strict=True)))]
            yield Partial(*(x.flatten(0, 1) for x in parts[0]))


def _together(parts: Iterator[Partial], number: int) -> Partial:
    """Rows of so many blocks from those of a few after the other, which are not all kept where nothing follows them."""
    first = next(parts)
    if torch.compiler.is_compiling() or is_followed(*first):
        return Partial(*map(torch.cat, zip(first, *parts, strict=True)))
    rows, place = Partial(*(x.new_empty(number, *x.shape[1:]) for x in first)), 0
    for part in itertools.chain((first,), parts):
        for whole, x in zip(rows, part, strict=True):
            whole[place : place + len(x)] = x
        place += len(part.out)
    return rows


def _left(bias: Tensor, number: Tensor, share: Tensor, window: int) -> Tensor:
    """Clusters' biases (N, C) by block, (N, C, n): -inf where the keys around it leave little or nothing of one."""
    (heads, size), num_blocks = bias.shape, -(-number.shape[1] // window)
    place = number * num_blocks + torch.arange(number.shape[1], device=number.device) // window
    none = bias.detach().new_zeros(heads, (size + 1) * num_blocks)
    added = share.detach(), torch.ones_like(none[:, :1]).expand(place.shape)
    sums = (none.scatter_add(1, place, x)[:, : size * num_blocks] for x in added)
    share_sums, count = (x.unflatten(1, (size, num_blocks)) for x in sums)
    gone, around = (torch.nn.functional.pad(x, (1, 1)).unfold(2, 3, 1).sum(-1) for x in (share_sums, count))
    faint = (1 - gone < torch.finfo(share.dtype).eps ** 0.5) | (around == count.sum(-1, keepdim=True))
    return torch.where(faint, -torch.inf, bias.unsqueeze(-1))


def _read(query: Tensor, sources: _Sources, scoring: Scoring) -> Partial:
    """Rows (N, n, R, D) of the blocks, in powers of two, and their log-normalisers; 0 where no key is seen."""
    (key, value, bias), clusters = sources.near, sources.clusters
    (heads, size, blocks), shape = clusters.bias.shape, query.shape[:3]
    rows = query.to(bias.dtype)
    # Rows last: what is taken back of a cluster is a few rows of its weights.
    near = scoring.biased(bias.flatten(0, 1), key.flatten(0, 1), rows.flatten(0, 1).mT)
    near, whole = near.unflatten(0, shape[:2]), clusters.bias.repeat_interleave(shape[2], -1)
    whole = scoring.biased(whole, clusters.key, rows.flatten(1, 2).mT).unflatten(2, shape[1:])
    peak = torch.maximum(near.detach().amax(2), whole.detach().amax(1))
    peak = torch.where(peak == -torch.inf, 0, peak)
    near, whole = (near - peak.unsqueeze(2)).exp2_(), (whole - peak.unsqueeze(1)).exp2_()
    first = torch.arange(heads, device=rows.device)[:, None, None] * size
    place = (first + sources.number) * blocks + torch.arange(blocks, device=rows.device).unsqueeze(-1)
    near_weight = whole.flatten(0, 2).index_select(0, place.flatten()).view(near.shape)
    near = torch.addcmul(near, sources.share, near_weight, value=-1)
    total = near.sum(2) + whole.sum(1)
    out = (whole.flatten(2, 3).mT @ clusters.value).unflatten(1, shape[1:]).flatten(0, 1)
    out = torch.baddbmm(out, near.flatten(0, 1).mT, value.flatten(0, 1)).unflatten(0, shape[:2])
    dead = total == 0
    safe = torch.where(dead, 1, total)
    log = torch.where(dead, -torch.inf, safe.log() + peak / LOG2_E)
    return Partial((out / safe.unsqueeze(-1)).to(query.dtype), log)


def _rows(x: Tensor, query: Tensor, num_blocks: int) -> Tensor:
    """Rows of blocks (B·H·n, G·w, …) as those of the query (B, H, G, L, …)."""
    batch, heads, groups, length = query.shape[:4]
    blocks = x.unflatten(0, (batch, heads, num_blocks)).unflatten(3, (groups, -1))
    return torch.flatten(blocks.transpose(2, 3), 3, 4)[:, :, :, :length]
