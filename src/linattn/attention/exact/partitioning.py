"""Which keys are merged: agglomerative clustering by Ward's criterion, all heads at once.

Letters: N heads of all rows of a batch, n keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Weights below exp(-60) of the largest count as that: their distances still say which of them go together.
_FAINTEST = -60.0
# In place of distances that are no finite numbers, so that an infinite key is merged last, and the search ends.
_FARTHEST = 1e30


class _Clusters:
    """Clusters of keys so far, each at the place of its first key; changed in place, O(n²) per round and no more."""

    def __init__(self, distance: Tensor, weight: Tensor, mass: Tensor, alive: Tensor) -> None:
        self.number = torch.arange(alive.shape[1], device=alive.device)
        self.rows = torch.arange(alive.shape[0], device=alive.device).unsqueeze(-1)
        self.distance = distance  # (N, n, n), squared, between the clusters' centres; symmetric to the bit
        self.weight = weight  # (N, n), of its centre among others
        self.mass = mass  # (N, n), by which a displacement is dear
        self.alive = alive  # (N, n), whether there is a cluster at this place
        self.place = self.number.expand(alive.shape)  # (N, n), of each key's cluster
        self.cost = self._costs(self.number.expand(alive.shape), distance)

    def merge_nearest(self, most: Tensor) -> None:
        """Merge pairs that are each other's nearest, at most `most` (N,) of a head, the cheapest."""
        cost, partner = self.cost.min(-1)
        mutual = (partner.gather(-1, partner) == self.number) & self.alive
        first = mutual & (self.number < partner)
        order = torch.where(first, cost, torch.inf).argsort(dim=-1, stable=True)
        first &= order.argsort(dim=-1) < most.unsqueeze(-1)
        absorbed = mutual & (partner < self.number) & first.gather(-1, partner)
        self.place = torch.where(absorbed, partner, self.number).gather(-1, self.place)
        self.alive = self.alive & ~absorbed
        # As many places for every head; where a head has fewer pairs, some of its clusters stay as they are.
        place = order[:, : int(first.sum(-1).max())]
        is_pair = first.gather(-1, place)
        self._move(place, torch.where(is_pair, partner.gather(-1, place), place), is_pair)

    def _move(self, place: Tensor, other: Tensor, is_pair: Tensor) -> None:
        """Put the clusters at places (N, k) where the means of theirs and the others' centres are, if pairs."""
        own, joining = self.weight.gather(-1, place), self.weight.gather(-1, other)
        share = torch.where(is_pair, joining / (own + joining), 0)
        gap = share * (1 - share) * self.distance[self.rows, place, other]
        rows = self.distance[self.rows, place]
        rows = rows + share.unsqueeze(-1) * (self.distance[self.rows, other] - rows) - gap.unsqueeze(-1)
        # Between two centres that both moved.
        wide = place.unsqueeze(1).expand(-1, place.shape[1], -1)
        near, far = rows.gather(2, wide), rows.gather(2, other.unsqueeze(1).expand_as(wide))
        both = near + share.unsqueeze(1) * (far - near) - gap.unsqueeze(1)
        rows = rows.scatter(2, wide, (both + both.mT) / 2).clamp(min=0)
        self.distance[self.rows, place] = rows
        self.distance.mT[self.rows, place] = rows
        for kept in (self.weight, self.mass):
            more = torch.where(is_pair, kept.gather(-1, other), 0)
            kept.scatter_add_(-1, place, more)
        # First the others', which are gone or, in place of a pair, the same.
        for places, costs in ((other, torch.full_like(rows, torch.inf)), (place, self._costs(place, rows))):
            self.cost[self.rows, places] = costs
            self.cost.mT[self.rows, places] = costs

    def _costs(self, place: Tensor, distance: Tensor) -> Tensor:
        """Ward's criterion (N, k, n) of merging clusters with others, by their distances; inf where one is none."""
        # m₁m₂/(m₁ + m₂) by its inverse: products of faint masses would be 0.
        light = 1 / self.mass
        inertia = 1 / (light.gather(-1, place).unsqueeze(-1) + light.unsqueeze(1))
        both = self.alive.gather(-1, place).unsqueeze(-1) & self.alive.unsqueeze(1)
        return torch.where(both & (place.unsqueeze(-1) != self.number), inertia * distance, torch.inf)


def partition(distance: Tensor, log_weight: Tensor, log_mass: Tensor, num_clusters: int) -> Tensor:
    """Put keys into at most so many clusters by merging the pairs that cost least, O(n²) per round of pairs.

        cost = m₁m₂/(m₁ + m₂) · |c₁ - c₂|²,   c the mean of a cluster's keys by their weights, m its mass

    A round merges pairs that are each other's nearest; pairs one by one, down to a single cluster, would be the same
    ones, since Ward's criterion never falls by merging. No round merges more than half of what is too much, the
    cheapest pairs: merged ones may go with others for less than what dear pairs cost.

    Args:
        distance: (..., n, n), squared, symmetric to rounding.
        log_weight: (..., n); -inf for absent keys, which are in no cluster.
        log_mass: (..., n), relative to any constant.
        num_clusters: at least 1.

    Returns:
        (..., n) integers: the number of each key's cluster, by the first keys' order; num_clusters for absent keys.

    Source: Ward 1963 (doi 10.1080/01621459.1963.10500845); Murtagh 1983 for pairs that are each other's nearest.
    """
    # How many rounds there are depends on the data, which neither the compiler nor torch.vmap may look at.
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(distance):
        # Imported here: a custom operator takes torch's compiler along.
        from linattn.attention.exact.opaque_partition import opaque_partition

        found: Tensor = opaque_partition(distance, log_weight, log_mass, num_clusters)
        return found
    return partition_plain(distance, log_weight, log_mass, num_clusters)


def partition_plain(distance: Tensor, log_weight: Tensor, log_mass: Tensor, num_clusters: int) -> Tensor:
    """The same for plain tensors, which may be looked at."""
    shape = log_weight.shape
    distance = distance.reshape(-1, *distance.shape[-2:]).nan_to_num(_FARTHEST, _FARTHEST).clamp(0, _FARTHEST)
    log_weight, log_mass = (x.reshape(-1, shape[-1]) for x in (log_weight, log_mass))
    alive = log_weight != -torch.inf
    weight, mass = (_relative(x, alive) for x in (log_weight, log_mass))
    clusters = _Clusters((distance + distance.mT) / 2, weight, mass, alive)
    while bool(((excess := clusters.alive.sum(-1) - num_clusters) > 0).any()):
        clusters.merge_nearest((excess + 1) // 2)
    rank = (clusters.alive.cumsum(-1) - 1).gather(-1, clusters.place)
    return torch.where(alive, rank, num_clusters).reshape(shape)


def _relative(logs: Tensor, alive: Tensor) -> Tensor:
    """Exponentials (N, n) of the present keys' logarithms relative to the largest."""
    logs = torch.where(alive, logs.nan_to_num(0.0), -torch.inf)
    peak = logs.amax(-1, keepdim=True)
    return torch.where(alive, logs - peak, 0).clamp(min=_FAINTEST).exp()
