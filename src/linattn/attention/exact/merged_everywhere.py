"""Merged keys with every key in view; letters as in exact/__init__.py, C merged keys, N = ⌈L/w⌉ blocks.

All keys of the call are put into C clusters. With a window each block of queries reads those clusters as they are
without the keys of its own block and of both neighbours, which it sees as they are: their sums over the blocks before
and over those after are added up, and nothing is subtracted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.exact.keys import Tokens, picked
from linattn.attention.exact.merging import clusters, merged, tilt
from linattn.attention.exact.query_moments import QueryMoments
from linattn.attention.exact.rule import Exact
from linattn.attention.exact.weighted_reading import Reading, read
from linattn.attention.softmax import exponentials, inert, softmax_weights

# Queries whose attention is the keys' mass, evenly spaced among those that there are.
_SAMPLE = 64
# Keys that join the clusters at once, or as many as there are clusters: cost is quadratic within, linear beyond.
_STEP = 1024


def attend_all_merging(
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,
    bias: Tensor | None,
    exact: Exact,
    scale: float,
    *,
    with_log: bool,
) -> Reading:
    """Rows over all keys, O(L·(C + 3w)·(D + Dv) + L·(C + 1024)·D) per head; with a window O(L·C/w·(D + Dv)) memory."""
    key, value = inert(bias, key, value)
    given = query.new_zeros(1, 1, 1, dtype=torch.promote_types(key.dtype, torch.float32)) if bias is None else bias
    tokens = Tokens(key, value, given.expand(key.shape[:3]))
    tokens = Tokens(*(x.to(given.dtype) for x in tokens))
    # Where they are the same tokens, a masked one's query counts as little as its key.
    live = (
        tokens.bias != -torch.inf
        if query.shape[3] == key.shape[2]
        else query.new_ones(*key.shape[:2], query.shape[3], dtype=torch.bool)
    )
    moments = QueryMoments.empty(key).add(query, live, scale)
    if key.shape[2] <= exact.num_merged:
        return read(query, tokens, scale, is_causal=False, with_log=with_log)
    number = _clusters(tokens, moments, _mass(query, live, tokens, scale), exact.num_merged)
    if exact.window is None:
        few = merged(tokens, number, moments.mean, exact.num_merged)
        return read(query, few, scale, is_causal=False, with_log=with_log)
    far = _without_neighbours(tokens, number, moments.mean, exact.num_merged, exact.window)
    parts = []
    for place, rows in enumerate(query.split(exact.window, 3)):
        near = tokens.cut(max(place - 1, 0) * exact.window, (place + 2) * exact.window)
        seen = Tokens(*(x[:, :, place] for x in far)).then(near)
        parts.append(read(rows, seen, scale, is_causal=False, with_log=with_log))
    return Reading.joined(parts)


def _mass(query: Tensor, live: Tensor, tokens: Tokens, scale: float) -> Tensor:
    """The logarithm (B, H, L) of what a sample of the queries attends to each key."""
    with torch.no_grad():
        live = live.expand(*query.shape[:2], -1)
        size = min(max(_SAMPLE // query.shape[2], 1), live.shape[-1])
        places = torch.arange(size, device=query.device) * live.sum(-1, keepdim=True) // max(size, 1)
        # The queries that there are come first, in their order.
        index = (~live).byte().argsort(dim=-1, stable=True).gather(-1, places)
        sample = picked(query.movedim(2, 3).flatten(3), index).unflatten(-1, query.shape[2::2]).flatten(2, 3)
        weights, _ = softmax_weights(sample, tokens.key, tokens.bias.unsqueeze(2), scale)
        return weights.sum(2).log()


def _clusters(tokens: Tokens, moments: QueryMoments, log_mass: Tensor, num_merged: int) -> Tensor:
    """The number (B, H, L) of each key's cluster, `num_merged` for absent ones; keys join step by step."""
    step = max(_STEP, num_merged)
    number = clusters(tokens.cut(0, step), moments, log_mass[..., :step], num_merged)
    with torch.no_grad():
        for start in range(step, tokens.bias.shape[2], step):
            few = merged(tokens.cut(0, start), number, moments.mean, num_merged)
            place = torch.arange(num_merged, device=number.device).unsqueeze(-1)
            few_mass = torch.where(number.unsqueeze(2) == place, log_mass[..., None, :start], -torch.inf).logsumexp(-1)
            mass = torch.cat((few_mass, log_mass[..., start : start + step]), -1)
            pool = few.then(tokens.cut(start, start + step))
            again = clusters(pool, moments, mass, num_merged)
            former = torch.cat((again[..., :num_merged], torch.full_like(again[..., :1], num_merged)), -1)
            number = torch.cat((former.gather(-1, number), again[..., num_merged:]), -1)
    return number


def _without_neighbours(tokens: Tokens, number: Tensor, mean: Tensor, num_merged: int, window: int) -> Tokens:
    """The clusters as each block of queries reads them (B, H, N, C, ·); free places have bias -inf.

    A key whose weight underflows beside its cluster's largest is lost with it, where that one is a neighbour.
    """
    place = torch.arange(num_merged, device=number.device).unsqueeze(-1)
    log_weight = tilt(tokens, mean).unsqueeze(2)
    weights, peak = exponentials(torch.where(number.unsqueeze(2) == place, log_weight, -torch.inf))
    one = tokens.key.new_ones(*tokens.key.shape[:3], 1)
    short = -tokens.key.shape[2] % window
    weights = torch.nn.functional.pad(weights, (0, short)).unflatten(3, (-1, window)).movedim(3, 2)
    rows = torch.nn.functional.pad(torch.cat((tokens.key, tokens.value, one), -1), (0, 0, 0, short))
    sums = weights @ rows.unflatten(2, (-1, window))
    total = _sums_two_before(sums) + _sums_two_before(sums.flip(2)).flip(2)
    safe = torch.where(total[..., -1:] == 0, 1, total[..., -1:])
    key, value, _ = (total / safe).split((tokens.key.shape[-1], tokens.value.shape[-1], 1), -1)
    bias = safe.squeeze(-1).log() + peak.movedim(3, 2) - (key @ mean[:, :, None, :, None]).squeeze(-1)
    return Tokens(key, value, torch.where(total[..., -1] == 0, -torch.inf, bias))


def _sums_two_before(sums: Tensor) -> Tensor:
    """Of blocks (B, H, N, ·, ·), the sums over those two or more before."""
    return torch.nn.functional.pad(sums, (0, 0, 0, 0, 2, 0))[:, :, : sums.shape[2]].cumsum(2)
