"""Which keys are merged: the light ones join the nearest heavier ones, all heads at once; by which distances.

Letters as in kv_cache/__init__.py: N heads of all rows of a batch, n keys, P width of a point, as D + Dv of a key and
its value, C clusters, r axes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Masses below exp(-60) of the largest count as that: their distances still say which of them go together.
_FAINTEST = -60.0
# In place of coordinates that are no finite numbers, so that an infinite key is merged last.
FARTHEST = 1e15
# Variance in the square of a mean that rounding makes of rows all alike.
ALIKE = 2.0**-36
# Distances between all keys of some heads, and those of them that are held at once, in a processor's cache.
_HEADS_CHUNK, _CHUNK = 2**22, 2**19


def partition(point: Tensor, log_mass: Tensor, num_clusters: int, num_rounds: int) -> Tensor:
    """Put keys (..., n, P) of masses (..., n) into at most so many clusters, the cheapest first; O(n²·P) time."""
    # cost = m₁m₂/(m₁ + m₂) · |x₁ - x₂|², x₂ the nearest of all heavier than x₁: Ward 1963, doi
    # 10.1080/01621459.1963.10500845. In each round those that cost least join the heavier one nearest to them, and it
    # what it joins; a cluster stands at the mean of its members by their masses. Every round but the last takes away
    # half of what is too much: clusters go together for less than what dear keys cost. Absent keys, of log mass -inf,
    # have the number num_clusters; of no more keys than that each has its place. Work depends on shapes alone.
    shape, size = log_mass.shape, max(_HEADS_CHUNK // max(log_mass.shape[-1] ** 2, 1), 1)
    pairs = zip(point.flatten(0, -3).split(size), log_mass.flatten(0, -2).split(size), strict=True)
    parts = [_merged_down(finite(x), relative(logs), num_clusters, num_rounds) for x, logs in pairs]
    return torch.cat(parts).view(shape)


def seeds(log_mass: Tensor, num_heaviest: int, num_seeds: int) -> tuple[Tensor, Tensor]:
    """Numbers (..., num_seeds) of the heaviest keys and others by roots of masses (..., n), and log masses for them."""
    shape, logs = log_mass.shape[:-1], log_mass.flatten(0, -2)
    mass = relative(logs)
    most = mass.topk(num_seeds)
    heaviest = most.indices[:, :num_heaviest]
    root = mass.scatter(-1, heaviest, 0).sqrt()
    reach, number = root.cumsum(-1), num_seeds - num_heaviest
    steps = (torch.arange(number, dtype=mass.dtype, device=mass.device) + 0.5) / number
    place = torch.searchsorted(reach, reach[:, -1:] * steps).clamp(max=mass.shape[1] - 1)
    # Each stands for a step of the sum of roots.
    standing = root.gather(-1, place) * reach[:, -1:] / number
    standing = torch.cat((most.values[:, :num_heaviest], standing), -1).log()
    # All of few, in their order and by their own masses.
    there = (logs != -torch.inf).cumsum(-1)
    count, each = there[:, -1:], torch.arange(num_seeds, device=mass.device)
    every = torch.searchsorted(there, torch.minimum(each + 1, count))
    log_masses = torch.where(each < count, logs.gather(-1, every), -torch.inf)
    place = torch.where(count <= num_seeds, every, torch.cat((heaviest, place), -1))
    standing = torch.where(count <= num_seeds, log_masses, standing)
    return place.unflatten(0, shape), standing.unflatten(0, shape)


def finite(point: Tensor) -> Tensor:
    """Coordinates that are finite and whose squares are."""
    return point.clamp(-FARTHEST, FARTHEST).nan_to_num_(FARTHEST)


def relative(logs: Tensor) -> Tensor:
    """Exponentials (N, n) of the present keys' logarithms relative to the largest; 0 for absent keys."""
    finite = logs.nan_to_num(0.0)
    mass = (finite - finite.amax(-1, keepdim=True)).clamp(min=_FAINTEST).exp()
    return mass.masked_fill(logs == -torch.inf, 0)


def _merged_down(point: Tensor, mass: Tensor, num_clusters: int, num_rounds: int) -> Tensor:
    """All rounds: the number (N, n) of each key's cluster, of keys (N, n, P) and masses (N, n), 0 for absent ones."""
    num_keys, absent = mass.shape[1], mass == 0
    number = torch.arange(num_keys, device=absent.device).expand(absent.shape)
    for left in reversed(range(num_rounds)):
        excess = mass.shape[1] - num_clusters
        if excess <= 0:
            break
        room = num_clusters + (excess // 2 if left else 0)
        joined = _round(point, mass, num_clusters, room, bool(left))
        # One place more, for those that are gone.
        gone = joined.new_full((*joined.shape[:1], 1), room)
        number = torch.cat((joined, gone), -1).gather(-1, number)
        if left:
            total = sums(mass.unsqueeze(-1), joined, room)
            point = weighted_sums(point, mass, joined, room) / torch.where(total == 0, 1, total)
            mass = total.squeeze(-1)
    return torch.where(absent, num_clusters, number)


def _round(point: Tensor, mass: Tensor, num_clusters: int, room: int, by_half: bool) -> Tensor:
    """One round that leaves no more than `room` clusters: the new number (N, n) of each, in the order of those left."""
    order = mass.argsort(dim=-1, descending=True, stable=True)
    mass = mass.gather(-1, order)
    first = torch.arange(len(order), device=order.device).unsqueeze(-1) * order.shape[1]
    # By rows, which is several times as fast as by numbers.
    point = point.flatten(0, 1).index_select(0, (order + first).flatten()).view(point.shape)
    number, there = torch.arange(mass.shape[1], device=mass.device), mass > 0
    # A matter of each head's own number of clusters, whatever is absent beside them.
    excess = (there.sum(-1, keepdim=True) - num_clusters).clamp(min=0)
    least, heavier = _nearest_before(point)
    joining = mass.gather(-1, heavier)
    cost = least * mass * (joining / torch.where(there, mass + joining, 1))
    # The heaviest stays; absent ones join none.
    cost = torch.where(there & (number > 0), cost, torch.inf)
    rank = cost.argsort(dim=-1, stable=True).argsort(dim=-1)
    joins = rank < (excess - excess // 2 if by_half else excess)
    root = torch.where(joins, heavier, number)
    # No chain is longer than those that join.
    for _ in range((mass.shape[1] - num_clusters).bit_length()):
        root = root.gather(-1, root)
    # Back in the order given.
    root = torch.empty_like(order).scatter(-1, order, order.gather(-1, root))
    stays = torch.empty_like(joins).scatter(-1, order, there & ~joins)
    return torch.where(stays, stays.cumsum(-1) - 1, room).gather(-1, root)


def _nearest_before(point: Tensor) -> tuple[Tensor, Tensor]:
    """The least square (N, n) of a distance to a point (N, n, P) before it, inf for the first; that point's number."""
    square, number = torch.linalg.vector_norm(point, dim=-1).square(), torch.arange(point.shape[1], device=point.device)
    size, minima = max(_CHUNK // max(square.numel(), 1), 1), []
    for start, rows in enumerate(number.split(size)):
        start, stop = start * size, start * size + len(rows)
        some = point[:, start:stop]
        distance = torch.baddbmm(square[:, :stop].unsqueeze(1), some, point[:, :stop].mT, alpha=-2)
        distance[..., start:].masked_fill_(rows.unsqueeze(-1) <= rows, torch.inf)
        minima.append(distance.min(-1))
    least, nearest = (torch.cat(parts, 1) for parts in zip(*minima, strict=True))
    return (least + square).clamp(min=0), nearest


def weighted_sums(x: Tensor, weight: Tensor, number: Tensor, num_clusters: int) -> Tensor:
    """`sums` of (N, n, ·) times weights (N, n), of which a few at a time are formed."""
    size = max(_CHUNK // max(x.shape[0] * x.shape[2], 1), 1)
    parts = zip(*(each.split(size, 1) for each in (x, weight.unsqueeze(-1), number)), strict=True)
    first, *others = (sums(some * factor, place, num_clusters) for some, factor, place in parts)
    return sum(others, first)


def sums(x: Tensor, number: Tensor, num_clusters: int) -> Tensor:
    """Sums (N, C, ·) over each cluster's members of (N, n, ·), by number (N, n); those of another number go nowhere."""
    rows = number.shape[0]
    place = number + (num_clusters + 1) * torch.arange(rows, device=number.device).unsqueeze(-1)
    totals = x.new_zeros(rows * (num_clusters + 1), x.shape[2]).index_add(0, place.flatten(), x.flatten(0, 1))
    return totals.view(rows, num_clusters + 1, x.shape[2])[:, :num_clusters]


# Axes, and the share of P from which there are more. On MiniLM's heads (P = 64) and on Gemma's (P = 512) the nearest of
# 64 to 256 clusters along these gives rows as near to softmax's as along all coordinates, or nearer.
_AXES, _WIDTHS_PER_AXIS = 16, 8
# Of subspace iteration.
_TURNS = 2
# Keys that axes are taken of.
MEASURED = 256


class Metric(NamedTuple):
    """Metric of distances between keys and their values (B, H, n, D + Dv): those of (x - mean)·factor."""

    mean: Tensor  # (B, H, 1, D + Dv); around 0 differences of large products would lose digits
    factor: Tensor  # (B, H, 1, D + Dv)

    @classmethod
    def of(cls, x: Tensor, share: Tensor, spread: Tensor, values: float = 1.0) -> Metric:
        """Of keys as queries of this spread (B, H, D) see them, and of values, by shares (B, H, n) of present keys."""
        share, width = share.unsqueeze(2), spread.shape[-1]
        mean = share @ x
        # In place, here and below: fresh memory for all keys costs as much as what is computed in it.
        variance = share @ (x - mean).pow_(2)
        wide = (variance[..., :width] * spread.unsqueeze(2).square()).sum(-1, keepdim=True)
        narrow = variance[..., width:].sum(-1, keepdim=True)
        are_alike = narrow <= ALIKE * mean[..., width:].square().sum(-1, keepdim=True)
        worth = torch.where(are_alike, 0, wide / narrow).sqrt() * values
        factor = torch.cat((spread.unsqueeze(2), worth.expand_as(variance[..., width:])), -1)
        # Mapped by torch.vmap where the factor is, by queries alone: what is multiplied in place must be.
        return cls(mean + factor.new_zeros(()), factor)

    def points(self, x: Tensor) -> Tensor:
        """Keys and values (B, H, n, D + Dv) as points between which distances are squares of differences."""
        return (x - self.mean).mul_(self.factor)


def num_axes(width: int) -> int:
    """r for keys and values of P numbers."""
    return min(max(_AXES, width // _WIDTHS_PER_AXIS), width)


class Axes(NamedTuple):
    """A few directions of a metric, along which nearly all of the distances between keys lie."""

    turn: Tensor  # (B, H, P, r), of keys and values as they are
    shift: Tensor  # (B, H, 1, r)

    @classmethod
    def of(cls, metric: Metric, point: Tensor) -> Axes:
        """The widest ones of points (B, H, n, P) of the metric: nearly their first principal axes. O(n·P·r)."""
        width, point = point.shape[-1], finite(point)
        # Products of three numbers near 1 are numbers, whatever size points have; a power of two rounds nothing.
        size = point.abs().amax((2, 3), keepdim=True)
        point = point / torch.where(size == 0, 1, size).log2().round().exp2()
        # From the widest coordinates on, by subspace iteration.
        widest = point.square().sum(2).topk(num_axes(width), -1).indices.unsqueeze(2)
        axes = (widest == torch.arange(width, device=widest.device).unsqueeze(-1)).to(point.dtype)
        for _ in range(_TURNS):
            axes = torch.linalg.qr(point.mT @ (point @ axes)).Q
        turn = metric.factor.mT * axes
        return cls(turn, metric.mean @ turn)

    def along(self, x: Tensor) -> Tensor:
        """Coordinates (B, H, n, r) of keys and values (B, H, n, P)."""
        return finite(x @ self.turn - self.shift)
