"""Merged keys with every key in view; letters as in kv_cache/__init__.py, C merged keys, S sampled queries.

All keys of the call are put into C clusters, by what a sample of the queries attends to. With a window each block of
queries reads those clusters without what the keys of its own block and of both neighbours have in them, and these
keys as they are (`window`). All that is chosen depends on a row's live tokens alone, wherever padding stands.
"""

from functools import partial

import torch
from torch import Tensor

from linattn.kv_cache.compiled import everywhere_in_compiled_code, is_compiled
from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.merging import cluster_means
from linattn.kv_cache.partitioning import MEASURED, Axes, Metric, partition, seeds
from linattn.kv_cache.query_sample import evenly, sampled_evenly
from linattn.kv_cache.window import read_beside_neighbours
from linattn.softmax.attention import Reading, Scoring, attend_to_all, inert, read
from linattn.softmax.extensions import is_readable
from linattn.softmax.tokens import Tokens

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
    config: MergedKV,
    scoring: Scoring,
    *,
    with_log: bool,
    backend: str = "auto",
) -> Reading:
    """Rows over all keys; O(L·(C + S)·D + L·C·Dv + L·r·(C + D + Dv)) time per head, a window's O(L·w·(D + Dv))."""
    key, value = inert(bias, key, value)
    key_bias = query.new_zeros(1, 1, 1, dtype=torch.promote_types(key.dtype, torch.float32)) if bias is None else bias
    tokens = Tokens(*(x.to(key_bias.dtype) for x in (key, value, key_bias.expand(key.shape[:3]))))
    # Asked of few keys too, which nothing merges: a call that runs on a short text runs on a long one.
    backend = "compiled" if is_compiled(backend, scoring.soft_cap, query, tokens) else "torch"
    # Within two blocks every row sees every key as it is.
    if key.shape[2] <= max(config.num_merged, 2 * (config.window or 0)):
        return _read(query, tokens, scoring, with_log=with_log)
    merged = partial(
        _attend_merging, config=config, scoring=scoring, with_log=with_log, backend=backend, is_masked=bias is not None
    )
    if config.window is None or bias is None:
        return merged(query, tokens)
    dead = tokens.bias == -torch.inf
    # Blocks are of live tokens: these come first, in their order, as they do where that may be looked at already.
    if is_readable(tokens.bias) and not bool((dead[..., :-1] & ~dead[..., 1:]).any()):
        return merged(query, tokens)
    order = dead.byte().argsort(dim=-1, stable=True)
    out, log = merged(_tokens_at(order, query), tokens.pick(order))
    back = order.argsort(-1)
    return Reading(_tokens_at(back, out), None if log is None else _tokens_at(back, log.unsqueeze(-1)).squeeze(-1))


def _read(query: Tensor, tokens: Tokens, scoring: Scoring, *, with_log: bool) -> Reading:
    """Rows over weighted keys, those without a fused kernel some at a time."""
    if with_log or scoring.soft_cap is not None:
        return Reading(*attend_to_all(query, tokens, *scoring))
    return read(query, tokens, scoring, is_causal=False, with_log=False)


def _tokens_at(order: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, H, G, L, ·) by number (B, H, L) of their tokens."""
    return rows.gather(3, order[:, :, None, :, None].expand_as(rows))


def _attend_merging(
    query: Tensor, tokens: Tokens, *, config: MergedKV, scoring: Scoring, with_log: bool, backend: str, is_masked: bool
) -> Reading:
    """Rows over more keys than merged ones; with a window the live ones come first."""
    sample = sampled_evenly(query, tokens.bias != -torch.inf, config.num_merged, scoring.scale, is_masked=is_masked)
    with torch.no_grad():
        distances = _distances(tokens, sample.spread)
    if backend == "compiled":
        start = _num_seeds(config.num_merged), _ROUNDS
        return everywhere_in_compiled_code(query, tokens, sample, distances, config, start, scoring, with_log=with_log)
    attended = sample.attends(tokens, scoring.soft_cap)
    with torch.no_grad():
        number = _clusters(tokens, distances, attended.log_mass, config.num_merged)
    means = cluster_means(tokens, number, attended.log_mass, config.num_merged)
    few = means.conserving(attended)
    if config.window is None:
        return _read(query, few, scoring, with_log=with_log)
    return read_beside_neighbours(query, tokens, few, number, means.share, config.window, scoring, with_log=with_log)


def _distances(tokens: Tokens, spread: Tensor) -> tuple[Metric, Axes]:
    """Metric of keys, as queries of this spread see them, and values, and its axes, by keys evenly spaced."""
    index, there = evenly(tokens.bias != -torch.inf, MEASURED, min(MEASURED, tokens.bias.shape[2]))
    some = torch.cat(tokens.pick(index)[:2], -1)
    # One that is no number would leave none of the others.
    there = there & (some.abs().amax(-1) < torch.inf)
    some, share = some.masked_fill(~there.unsqueeze(-1), 0), there.to(some.dtype)
    metric = Metric.of(some, share / share.sum(-1, keepdim=True).clamp(min=1), spread, _VALUES)
    return metric, Axes.of(metric, metric.points(some) * share.unsqueeze(-1))


def _num_seeds(num_merged: int) -> int:
    """Keys that clusters are made of at first."""
    return max(_SEEDS, _SEEDS_PER_CLUSTER * num_merged)


def _clusters(tokens: Tokens, distances: tuple[Metric, Axes], log_mass: Tensor, num_merged: int) -> Tensor:
    """The number (B, H, L) of each key's cluster, C for absent ones: that of the nearest of the seeds' clusters."""
    metric, axes = distances
    num_seeds = _num_seeds(num_merged)
    if log_mass.shape[2] > num_seeds:
        place, standing = seeds(log_mass, num_merged, num_seeds)
        pool = tokens.pick(place)
    else:
        pool, standing = tokens, log_mass
    few = partition(metric.points(torch.cat(pool[:2], -1)), standing, num_merged, _ROUNDS)
    means = cluster_means(pool, few, standing, num_merged)
    centre = axes.along(torch.cat((means.key, means.value), -1))
    # The nearest has the largest x·c - |c|²/2.
    near = torch.where(means.size == 0, -torch.inf, centre.square().sum(-1) / -2).unsqueeze(2)
    pieces = zip(*(x.split(max(_CHUNK // max(near.numel(), 1), 1), 2) for x in tokens[:2]), strict=True)
    numbers = [(axes.along(torch.cat(keys, -1)) @ centre.mT).add_(near).argmax(-1) for keys in pieces]
    live, number = log_mass != -torch.inf, torch.cat(numbers, 2)
    # Few enough stay alone, also where axes tell them not apart.
    place = live.cumsum(-1)
    return torch.where(live, torch.where(place[..., -1:] <= num_merged, place - 1, number), num_merged)
