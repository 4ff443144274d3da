"""Merged keys with every key in view; letters as in exact/__init__.py, C merged keys, S sampled queries.

All keys of the call are put into C clusters, by what a sample of the queries attends to. With a window each block of
queries reads those clusters without what the keys of its own block and of both neighbours have in them, and these
keys as they are (`window`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.exact.keys import Tokens, picked
from linattn.attention.exact.merged.compiled import everywhere_in_compiled_code, is_compiled
from linattn.attention.exact.merged.merging import Metric, cluster_means
from linattn.attention.exact.merged.partitioning import partition, seeds
from linattn.attention.exact.merged.query_sample import QuerySample
from linattn.attention.exact.merged.window import read_beside_neighbours
from linattn.attention.exact.rule import Exact
from linattn.attention.exact.weighted_reading import Reading, read
from linattn.attention.softmax import inert

# Queries whose attention is the keys' mass: as many as keep their logits within these, and no fewer than that.
_SAMPLED, _FEWEST = 2**17, 64
# Keys that clusters are made of at first, or so many times the clusters; all others join the nearest.
_SEEDS, _SEEDS_PER_CLUSTER = 512, 4
_ROUNDS = 6
# How much values count beside keys when distances are taken, against their own spread.
_VALUES = 0.5
# Logits held at once: few enough to stay in a processor's cache from one pass to the next.
_CHUNK = 2**19


def attend_all_merging(
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,
    bias: Tensor | None,
    exact: Exact,
    scale: float,
    *,
    with_log: bool,
    backend: str = "auto",
) -> Reading:
    """Rows over all keys; per head O(L·(2C + S)·D + L·C·Dv) time, with a window O(L·w·(D + Dv)) more.

    Many queries in compiled code, where that can run them, unless the backend is "blocked".
    """
    key, value = inert(bias, key, value)
    given = query.new_zeros(1, 1, 1, dtype=torch.promote_types(key.dtype, torch.float32)) if bias is None else bias
    tokens = Tokens(key, value, given.expand(key.shape[:3]))
    tokens = Tokens(*(x.to(given.dtype) for x in tokens))
    if key.shape[2] <= exact.num_merged:
        return read(query, tokens, scale, is_causal=False, with_log=with_log)
    # Where they are the same tokens, a masked one's query counts as little as its key.
    live = (
        tokens.bias != -torch.inf
        if query.shape[3] == key.shape[2]
        else query.new_ones(*key.shape[:2], query.shape[3], dtype=torch.bool)
    )
    sample = _sampled(query, live, key.shape[2], scale)
    if is_compiled(backend, query, tokens):
        beginning = _num_seeds(exact.num_merged), _ROUNDS, _VALUES
        return everywhere_in_compiled_code(query, tokens, sample, exact, beginning, scale, with_log=with_log)
    attended = sample.attends(tokens)
    with torch.no_grad():
        number = _clusters(tokens, sample.spread, attended.log_mass, exact.num_merged)
    means = cluster_means(tokens, number, attended.log_mass, exact.num_merged)
    few = means.conserving(attended)
    if exact.window is None:
        return read(query, few, scale, is_causal=False, with_log=with_log)
    return read_beside_neighbours(query, tokens, few, number, means.share, exact.window, scale, with_log=with_log)


def _sampled(query: Tensor, live: Tensor, num_keys: int, scale: float) -> QuerySample:
    """Queries evenly spaced among those that there are."""
    live = live.expand(*query.shape[:2], -1)
    size = max(_SAMPLED // num_keys, _FEWEST) // query.shape[2]
    size, number = min(max(size, 1), live.shape[-1]), live.sum(-1, keepdim=True)
    # Each of them once where they are fewer.
    places = torch.arange(size, device=query.device) * number.clamp(min=size) // max(size, 1)
    # The queries that there are come first, in their order.
    index = (~live).byte().argsort(dim=-1, stable=True).gather(-1, places)
    there = (places < number).unsqueeze(-1).expand(-1, -1, -1, query.shape[2]).flatten(2)
    found = picked(query.movedim(2, 3).flatten(3), index).unflatten(-1, query.shape[2::2]).flatten(2, 3)
    found = found.to(torch.promote_types(query.dtype, torch.float32)) * scale
    return QuerySample(torch.where(there.unsqueeze(-1), found, 0), there)


def _num_seeds(num_merged: int) -> int:
    """Keys that clusters are made of at first."""
    return max(_SEEDS, _SEEDS_PER_CLUSTER * num_merged)


def _clusters(tokens: Tokens, spread: Tensor, log_mass: Tensor, num_merged: int) -> Tensor:
    """The number (B, H, L) of each key's cluster, C for absent ones: that of the nearest of the seeds' clusters.

    Keys are measured by what queries of this spread see, and by value.
    """
    num_seeds = _num_seeds(num_merged)
    if log_mass.shape[2] > num_seeds:
        place, standing = seeds(log_mass, num_merged, num_seeds)
        pool = tokens.pick(place)
    else:
        pool, standing = tokens, log_mass
    both = torch.cat(pool[:2], -1)
    metric = Metric.of(both, torch.softmax(standing, -1).nan_to_num(0.0), spread, _VALUES)
    few = partition(metric.points(both), standing, num_merged, _ROUNDS)
    means = cluster_means(pool, few, standing, num_merged)
    # The nearest has the largest x·c - |c|²/2, in the metric and around its mean.
    centre = torch.cat((means.key, means.value), -1) - metric.mean
    weighted = centre * metric.factor.square()
    near = -((centre / 2 + metric.mean) * weighted).sum(-1)
    parts = weighted[..., : spread.shape[-1]], weighted[..., spread.shape[-1] :]
    number = _nearest(tokens, parts, torch.where(means.size == 0, -torch.inf, near))
    return torch.where(log_mass == -torch.inf, num_merged, number)


def _nearest(tokens: Tokens, parts: tuple[Tensor, Tensor], near: Tensor) -> Tensor:
    """The number (B, H, L) of the cluster (B, H, C, ·) of the largest product with a key and its value."""
    key, value = (x.flatten(0, 1).mT for x in parts)
    shift, found = near.flatten(0, 1).unsqueeze(1), []
    size = max(_CHUNK // max(shift.numel(), 1), 1)
    for k, v in zip(*(x.flatten(0, 1).split(size, 1) for x in tokens[:2]), strict=True):
        found.append(torch.baddbmm(torch.baddbmm(shift, k, key), v, value).argmax(-1))
    return torch.cat(found, 1).view(tokens.bias.shape)
