"""Weighted keys (k, v, β), each standing for many, and how they are merged; letters as in kv_cache/__init__.py.

A weighted key adds exp(q·k + β) to the denominator and exp(q·k + β)·v to the numerator; an exact key has β = 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kv_cache.partitioning import MEASURED, Axes, Metric, partition, sums, weighted_sums
from linattn.kv_cache.query_sample import QuerySample, SampleAttention
from linattn.softmax.attention import soft_capped
from linattn.softmax.tokens import Tokens


def reduced(
    tokens: Tokens,
    sample: QuerySample,
    num_merged: int,
    num_newest: int = 0,
    soft_cap: float | None = None,
    *,
    along_axes: bool = False,
) -> tuple[Tokens, Tensor]:
    """At most `num_merged` weighted keys in place of n > num_merged (B, H, n, ·), the last `num_newest` unmerged.

    Beside them the numbers (B, H, C) of the only key in each cluster: 0 where there is none, n where several are.
    O(n²·(D + Dv)) time, along axes O(n²·r + n·r·(D + Dv)).
    """
    attended, number = sample.attends(tokens, soft_cap), tokens.bias.shape[2]
    size, room = number - num_newest, num_merged - num_newest
    older, newest, log_mass = tokens.cut(0, size), tokens.cut(size, number), attended.log_mass[..., :size]
    with torch.no_grad():
        there = (older.bias != -torch.inf).to(older.bias.dtype)
        share = there / there.sum(-1, keepdim=True).clamp(min=1)
        point = torch.cat(older[:2], -1)
        metric = Metric.of(point, share, sample.spread)
        # Axes tell as much of rounded keys; of few, or not on a CPU, finding them takes longer than it saves.
        if along_axes and point.is_cpu and size >= 3 * MEASURED:
            some = slice(None, None, size // MEASURED)
            point = Axes.of(metric, metric.points(point[:, :, some]) * there[:, :, some, None]).along(point)
        else:
            point = metric.points(point)
        cluster = partition(point, log_mass, room, num_rounds=1)
    means, key = cluster_means(older, cluster, log_mass, room), torch.arange(number, device=cluster.device)
    only = cluster.new_zeros(*cluster.shape[:2], room + 1).scatter(-1, cluster, key[:size].expand_as(cluster))[..., :-1]
    member = torch.cat((torch.where(means.size > 1, number, only), key[size:].expand(*only.shape[:2], -1)), -1)
    return means.conserving(attended).then(newest), member


class ClusterMeans(NamedTuple):
    """Clusters by their members' weights; those without members are 0."""

    key: Tensor  # (B, H, C, D), means
    value: Tensor  # (B, H, C, Dv)
    log_mass: Tensor  # (B, H, C), logarithms of the sums of weights
    share: Tensor  # (B, H, n), of each member in its cluster's
    size: Tensor  # (B, H, C), numbers of members
    bias_sum: Tensor  # (B, H, C), sums of the members' biases

    def conserving(self, attended: SampleAttention) -> Tokens:
        """Weighted keys to which the sample attends as much as to their members; biases of free places are -inf."""
        logits = soft_capped(attended.query @ self.key.mT, attended.soft_cap)
        bias = self.log_mass - (logits - attended.log_normalizer.unsqueeze(-1)).logsumexp(2)
        # A key that stays alone keeps its own to the bit.
        bias = torch.where(self.size == 0, -torch.inf, torch.where(self.size == 1, self.bias_sum, bias))
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
    total, size, bias_sums = counts.split(1, -1)
    safe = torch.where(total == 0, 1, total)
    # Absent keys have weight 0 whatever they are divided by.
    share = weight / safe.squeeze(-1).gather(-1, number.clamp(max=num_clusters - 1))
    log_mass = safe.squeeze(-1).log() + peak[..., :num_clusters]
    return ClusterMeans(key / safe, value / safe, log_mass, share, size.squeeze(-1), bias_sums.squeeze(-1))
