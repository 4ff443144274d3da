"""Which keys are merged: agglomerative clustering by Ward's criterion, all heads at once.

Letters: N heads of all rows of a batch, n keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Weights below exp(-60) of the largest count as that: their distances still say which of them go together.
_FAINTEST = -60.0
# In place of distances that are no finite numbers, so that an infinite key is merged last, and the search ends.
_FARTHEST = 1e30


class _Clusters(NamedTuple):
    """Clusters of keys so far, each at the place of its first key."""

    distance: Tensor  # (N, n, n), squared, between the clusters' centres; symmetric to the bit
    weight: Tensor  # (N, n), of its centre among others
    mass: Tensor  # (N, n), by which a displacement is dear
    alive: Tensor  # (N, n), whether there is a cluster at this place
    place: Tensor  # (N, n), of each key's cluster

    def merge_nearest(self, most: Tensor) -> _Clusters:
        """Merge pairs that are each other's nearest, at most `most` (N,) of a head, the cheapest."""
        number = torch.arange(self.mass.shape[1], device=self.mass.device)
        cost, partner = self._cost().min(-1)
        mutual = (partner.gather(-1, partner) == number) & self.alive
        first = mutual & (number < partner)
        order = torch.where(first, cost, torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
        first &= order < most.unsqueeze(-1)
        absorbed = mutual & (partner < number) & first.gather(-1, partner)
        weight, mass = (x + torch.where(first, x.gather(-1, partner), 0) for x in (self.weight, self.mass))
        place = torch.where(absorbed, partner, number).gather(-1, self.place)
        share = torch.where(first, self.weight.gather(-1, partner) / weight, 0)
        return _Clusters(self._distance(partner, share), weight, mass, self.alive & ~absorbed, place)

    def _cost(self) -> Tensor:
        """Ward's criterion (N, n, n): what merging two adds to the squared displacements; inf where one is none."""
        # m₁m₂/(m₁ + m₂) by its inverse: products of faint masses would be 0.
        light = 1 / self.mass
        inertia = 1 / (light.unsqueeze(-1) + light.unsqueeze(-2))
        both = self.alive.unsqueeze(-1) & self.alive.unsqueeze(-2)
        both &= ~torch.eye(both.shape[-1], dtype=torch.bool, device=both.device)
        return torch.where(both, inertia * self.distance, torch.inf)

    def _distance(self, partner: Tensor, share: Tensor) -> Tensor:
        """Distances once each centre has moved by a share of the way to its partner's."""
        apart = self.distance.gather(-1, partner.unsqueeze(-1)).squeeze(-1)
        gap = share * (1 - share) * apart
        distance = self.distance
        for _ in range(2):  # rows, then columns
            other = distance.gather(1, partner.unsqueeze(-1).expand_as(distance))
            moved = distance + share.unsqueeze(-1) * (other - distance) - gap.unsqueeze(-1)
            distance = moved.mT
        return ((distance + distance.mT) / 2).clamp(min=0)


def partition(distance: Tensor, log_weight: Tensor, log_mass: Tensor, num_clusters: int) -> Tensor:
    """Put keys into at most so many clusters by merging the pairs that cost least, O(n²) per round of pairs.

        cost = m₁m₂/(m₁ + m₂) · |c₁ - c₂|²,   c the mean of a cluster's keys by their weights, m its mass

    A round merges pairs that are each other's nearest, the cheapest first: pairs one by one, down to a single cluster,
    would be the same ones, since Ward's criterion never falls by merging.

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
    followed = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(distance)
    found: Tensor = (_opaque if followed else _partition)(distance, log_weight, log_mass, num_clusters)
    return found


def _partition(distance: Tensor, log_weight: Tensor, log_mass: Tensor, num_clusters: int) -> Tensor:
    """The same, of plain tensors."""
    shape = log_weight.shape
    distance = distance.reshape(-1, *distance.shape[-2:]).nan_to_num(_FARTHEST, _FARTHEST).clamp(0, _FARTHEST)
    log_weight, log_mass = (x.reshape(-1, shape[-1]) for x in (log_weight, log_mass))
    alive = log_weight != -torch.inf
    place = torch.arange(shape[-1], device=alive.device).expand(alive.shape)
    weight, mass = (_relative(x, alive) for x in (log_weight, log_mass))
    clusters = _Clusters((distance + distance.mT) / 2, weight, mass, alive, place)
    while bool(((excess := clusters.alive.sum(-1) - num_clusters) > 0).any()):
        clusters = clusters.merge_nearest(excess)
    rank = (clusters.alive.cumsum(-1) - 1).gather(-1, clusters.place)
    return torch.where(alive, rank, num_clusters).reshape(shape)


def _relative(logs: Tensor, alive: Tensor) -> Tensor:
    """Exponentials (N, n) of the present keys' logarithms relative to the largest."""
    logs = torch.where(alive, logs.nan_to_num(0.0), -torch.inf)
    peak = logs.amax(-1, keepdim=True)
    return torch.where(alive, logs - peak, 0).clamp(min=_FAINTEST).exp()


_opaque = torch.library.custom_op("linattn::partition", _partition, mutates_args=())


@_opaque.register_fake
def _(distance: Tensor, log_weight: Tensor, log_mass: Tensor, num_clusters: int) -> Tensor:
    """The numbers' shape."""
    return log_weight.new_empty(log_weight.shape, dtype=torch.int64)


def _mapped(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    """Under torch.vmap: one more dimension in front, as the operator takes any number of them."""
    *tensors, num_clusters = (
        x.expand(info.batch_size, *x.shape)
        if dim is None and isinstance(x, Tensor)
        else x.movedim(dim, 0)
        if isinstance(x, Tensor)
        else x
        for x, dim in zip(arguments, in_dims, strict=True)
    )
    return _opaque(*tensors, num_clusters), 0


torch.library.register_vmap(_opaque, _mapped)
