"""Weighted keys (k, v, β), each standing for many, and how they are merged; letters as in exact/__init__.py.

A weighted key adds exp(q·k + β) to the denominator and exp(q·k + β)·v to the numerator; an exact key has β = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.partitioning import partition, sums, weighted_sums
from linattn.attention.exact.query_moments import QueryMoments


def reduced(tokens: Tokens, moments: QueryMoments, num_merged: int) -> Tokens:
    """At most `num_merged` weighted keys in place of these (B, H, n, ·); O(n²·D + n·Dv).

    Merged are those of least Ward cost in the metric of the queries' variances, with what the mean queries of the
    group's heads attend to for masses. Which they are is a constant for gradients.
    """
    if tokens.bias.shape[2] <= num_merged:
        return tokens
    with torch.no_grad():
        logits = moments.means @ tokens.key.mT + tokens.bias.unsqueeze(2)
        log_mass = torch.log_softmax(logits, -1).logsumexp(2).masked_fill(tokens.bias == -torch.inf, -torch.inf)
        # Around their mean: differences of large products would lose digits.
        there = (tokens.bias != -torch.inf).unsqueeze(-1)
        centre = torch.where(there, tokens.key, 0).sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp(min=1)
        point = (tokens.key - centre) * moments.spread.unsqueeze(2)
        number = partition(point, log_mass, num_merged, num_rounds=1)
    return merged(tokens, number, moments.mean, num_merged)


def tilt(tokens: Tokens, mean: Tensor) -> Tensor:
    """t = q̄·k + β (B, H, n): the logarithms of the keys' weights at the mean query (B, H, D)."""
    return (tokens.key @ mean.unsqueeze(-1)).squeeze(-1) + tokens.bias


def merged(tokens: Tokens, number: Tensor, mean: Tensor, num_merged: int) -> Tokens:
    """One weighted key for each cluster of keys, by number (B, H, n); free places have bias -inf.

        k = Σ p_i k_i,   v = Σ p_i v_i,   β = log Σ exp(t_i) - q̄·k,   p = softmax(t) within the cluster, t = q̄·k + β

    At the mean query q̄ the denominator, its gradient in q, and the numerator are those of the keys merged. Several
    merges at one mean query are one: only who is with whom matters. O(n·(D + Dv)); differentiable in keys, values,
    biases and the mean query.
    """
    means = cluster_means(tokens, number, tilt(tokens, mean), num_merged)
    return means.weighted(means.log_mass - (means.key @ mean.unsqueeze(-1)).squeeze(-1))


class ClusterMeans(NamedTuple):
    """Clusters by their members' weights; those without members are 0."""

    key: Tensor  # (B, H, C, D), means
    value: Tensor  # (B, H, C, Dv)
    log_mass: Tensor  # (B, H, C), logarithms of the sums of weights
    share: Tensor  # (B, H, n), of each member in its cluster's
    size: Tensor  # (B, H, C), numbers of members
    own: Tensor  # (B, H, C), sums of the members' biases

    def weighted(self, bias: Tensor) -> Tokens:
        """As weighted keys with these biases (B, H, C); free places have bias -inf.

        A key that stays alone keeps its own to the bit, however often it is looked at.
        """
        bias = torch.where(self.size == 0, -torch.inf, torch.where(self.size == 1, self.own, bias))
        return Tokens(self.key, self.value, bias)


def cluster_means(tokens: Tokens, number: Tensor, log_weight: Tensor, num_clusters: int) -> ClusterMeans:
    """The means of clusters, by number (B, H, n), with weights exp(log_weight), -inf for absent keys."""
    peak = log_weight.new_full((*number.shape[:2], num_clusters + 1), -torch.inf)
    peak = peak.scatter_reduce(-1, number, log_weight.detach(), "amax")
    peak = torch.where(peak == -torch.inf, 0, peak)
    weight, there = (log_weight - peak.gather(-1, number)).exp(), number < num_clusters
    counts = torch.stack((weight, there.to(weight.dtype), torch.where(there, tokens.bias, 0)), -1)
    flat, place = weight.flatten(0, 1), number.flatten(0, 1)
    key, value = (weighted_sums(x.flatten(0, 1), flat, place, num_clusters) for x in tokens[:2])
    counts = sums(counts.flatten(0, 1), place, num_clusters)
    key, value, counts = (x.unflatten(0, number.shape[:2]) for x in (key, value, counts))
    total, size, own = counts.split(1, -1)
    safe = torch.where(total == 0, 1, total)
    # Absent keys have weight 0 whatever they are divided by.
    share = weight / safe.squeeze(-1).gather(-1, number.clamp(max=num_clusters - 1))
    log_mass = safe.squeeze(-1).log() + peak[..., :num_clusters]
    return ClusterMeans(key / safe, value / safe, log_mass, share, size.squeeze(-1), own.squeeze(-1))
