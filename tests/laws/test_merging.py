"""What a merge is: who is merged with whom, and what the merged key conserves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from grid import qkv, tokens
from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.merging import clusters, merged, reduced, tilt
from linattn.attention.exact.partitioning import partition
from linattn.attention.exact.query_moments import QueryMoments


def weighted(num_keys: int = 40, absent: float = 0.2) -> tuple[Tokens, QueryMoments]:
    """Weighted keys, some of them absent, and the moments of queries with a mean of their own."""
    query, key, value = qkv(num_queries=50, num_keys=num_keys)
    bias = tokens(2, 2, num_keys, seed=5)
    gone = torch.rand(bias.shape, generator=torch.Generator().manual_seed(6)) < absent
    live = torch.ones(2, 1, 50, dtype=torch.bool)
    moments = QueryMoments.empty(key).add(query.unflatten(1, (2, 2)) + 0.5, live, 1.0)
    return Tokens(key, value, bias.masked_fill(gone, -torch.inf)), moments


@pytest.mark.parametrize("num_merged", [1, 5, 33, 40])
def test_a_merge_conserves_what_the_mean_query_reads(num_merged: int) -> None:
    """Denominator, its gradient, and numerator at the mean query."""
    keys, moments = weighted()
    few = reduced(keys, moments, num_merged)
    assert few.bias.shape[2] == num_merged
    mean = moments.mean.unsqueeze(2)

    def read(x: Tokens) -> tuple[Tensor, ...]:
        query = mean.detach().requires_grad_()
        log = (query @ x.key.mT + x.bias.unsqueeze(2)).logsumexp(-1)
        (slope,) = torch.autograd.grad(log.sum(), query)
        return log, slope, torch.softmax(query @ x.key.mT + x.bias.unsqueeze(2), -1) @ x.value

    for found, truth in zip(read(few), read(keys), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_keys_that_stay_alone_are_the_same_to_the_bit() -> None:
    """However often a stream looks at them, in float32 too."""
    keys, moments = weighted(absent=0.0)
    keys, moments = Tokens(*(x.float() for x in keys)), QueryMoments(*(x.float() for x in moments))
    number = clusters(keys, moments, tilt(keys, moments.mean), 30)
    few = merged(keys, number, moments.mean, 30)
    alone = (number.unsqueeze(-1) == number.unsqueeze(-2)).sum(-1) == 1
    for b, h, j in alone.nonzero().tolist():
        for before, after in zip(keys, few, strict=True):
            assert torch.equal(before[b, h, j], after[b, h, number[b, h, j]])
    assert alone.any()


def test_merging_twice_is_merging_once() -> None:
    """At one mean query only who is with whom matters."""
    keys, moments = weighted(absent=0.0)
    once = torch.arange(40).expand(2, 2, 40) // 10
    twice = torch.arange(40).expand(2, 2, 40) // 5
    between = merged(keys, twice, moments.mean, 8)
    found = merged(between, torch.arange(8).expand(2, 2, 8) // 2, moments.mean, 4)
    for x, y in zip(found, merged(keys, once, moments.mean, 4), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_clusters_are_those_of_merging_one_by_one() -> None:
    """Down to one pair more than wanted, the cheapest pair is among those that are each other's nearest."""
    keys, moments = weighted(num_keys=14, absent=0.0)
    log_weight = tilt(keys, moments.mean)
    found = clusters(keys, moments, log_weight, 13)
    covariance = moments.covariance
    for b, h in itertools.product(range(2), range(2)):
        cost = {}
        for i, j in itertools.combinations(range(14), 2):
            step = keys.key[b, h, i] - keys.key[b, h, j]
            m = log_weight[b, h, [i, j]].exp()
            cost[i, j] = float(m.prod() / m.sum() * (step @ covariance[b, h] @ step))
        i, j = min(cost, key=cost.__getitem__)
        assert found[b, h, i] == found[b, h, j]
        assert found[b, h].unique().tolist() == list(range(13))


def by_hand(points: Tensor, weight: Tensor, mass: Tensor, num_clusters: int) -> list[int]:
    """The same rounds with centres formed anew from all members."""
    groups = [[i] for i in range(len(points))]
    while (excess := len(groups) - num_clusters) > 0:
        centres = torch.stack([(weight[g, None] * points[g]).sum(0) / weight[g].sum() for g in groups])
        m = torch.stack([mass[g].sum() for g in groups])
        cost = m * m.unsqueeze(-1) / (m + m.unsqueeze(-1)) * torch.cdist(centres, centres).square()
        least, partner = cost.fill_diagonal_(torch.inf).min(-1)
        pairs = [(float(least[i]), i, int(j)) for i, j in enumerate(partner) if i < j and partner[j] == i]
        for _, i, j in sorted(pairs)[: (excess + 1) // 2]:
            groups[i], groups[j] = groups[i] + groups[j], []
        groups = [g for g in groups if g]
    return [next(n for n, g in enumerate(groups) if i in g) for i in range(len(points))]


@pytest.mark.parametrize("num_clusters", [1, 3, 11, 29])
def test_every_round_knows_the_centres_of_merged_keys(num_clusters: int) -> None:
    """For weights and masses of their own, several heads at once."""
    points, weight, mass = tokens(3, 30, 2), tokens(3, 30, seed=1), tokens(3, 30, seed=2)
    found = partition(torch.cdist(points, points).square(), weight, mass, num_clusters)
    for head, given in enumerate(zip(points, weight.exp(), mass.exp(), strict=True)):
        assert found[head].tolist() == by_hand(*given, num_clusters)


def test_far_groups_are_found() -> None:
    """Three far groups are found whatever the masses within, and equal keys cost nothing."""
    place = torch.tensor([0.0, 10.0, 0.1, 30.0, 10.1, 0.2, 30.1, 10.0]).view(1, -1)
    distance = (place.unsqueeze(-1) - place.unsqueeze(-2)).square()
    weight = torch.tensor([[0.0, -3.0, -70.0, 2.0, 0.0, 1.0, -9.0, 5.0]])
    assert partition(distance, weight, weight, 3).tolist() == [[0, 1, 0, 2, 1, 0, 2, 1]]
    assert partition(torch.zeros(1, 8, 8), weight, weight, 1).tolist() == [[0] * 8]


def test_keys_that_are_no_numbers_do_not_hang_the_search() -> None:
    distance = torch.full((1, 4, 4), torch.nan)
    weight = torch.tensor([[torch.nan, 0.0, torch.inf, 1.0]])
    assert partition(distance, weight, weight, 2).max() <= 1


def test_absent_keys_never_merge() -> None:
    keys, moments = weighted()
    number = clusters(keys, moments, tilt(keys, moments.mean), 5)
    absent = keys.bias == -torch.inf
    assert (number[absent] == 5).all()
    assert (number[~absent] < 5).all()
    few = reduced(weighted(num_keys=12, absent=0.7)[0], moments, 9)
    assert ((few.bias != -torch.inf).sum(-1) == (weighted(num_keys=12, absent=0.7)[0].bias != -torch.inf).sum(-1)).all()


@pytest.mark.parametrize("sizes", [[50], [1] * 50, [7, 0, 20, 23]], ids=str)
def test_moments_are_those_of_all_queries_however_they_came(sizes: list[int]) -> None:
    """Mean and covariance of the live queries of a group, times the scale, far from the origin too."""
    query = tokens(2, 2, 3, 50, 4) + 1e4
    live = torch.rand(2, 1, 50, generator=torch.Generator().manual_seed(7)) > 0.3
    moments = QueryMoments.empty(query[:, :, 0])
    for part, seen in zip(query.split(sizes, 3), live.split(sizes, 2), strict=True):
        moments = moments.add(part.masked_fill(~seen[:, :, None, :, None], torch.nan), seen, 0.5)
    for b, h in itertools.product(range(2), range(2)):
        rows = 0.5 * query[b, h][:, live[b, 0]].flatten(0, 1)
        assert moments.weight[b, h] == len(rows)
        torch.testing.assert_close(moments.mean[b, h], rows.mean(0), rtol=1e-12, atol=0)
        wanted = torch.cov(rows.T, correction=0)
        torch.testing.assert_close(moments.covariance[b, h], wanted, rtol=1e-8, atol=1e-8)


def test_earlier_queries_count_less() -> None:
    """As if they were fewer: 1/e after 600 tokens."""
    early, late = tokens(1, 1, 1, 8, 3), tokens(1, 1, 1, 8, 3, seed=1) + 1
    live = torch.ones(1, 1, 8, dtype=torch.bool)
    moments = QueryMoments.empty(early[:, :, 0]).add(early, live, 1.0).decay(600).add(late, live, 1.0)
    share = 1 / (1 + torch.e)
    mean = share * early.mean(3) + (1 - share) * late.mean(3)
    torch.testing.assert_close(moments.mean, mean[:, :, 0], rtol=1e-12, atol=1e-12)
    rows = torch.cat((early, late), 3)[0, 0, 0] - moments.mean[0, 0]
    weights = torch.tensor([share] * 8 + [1 - share] * 8, dtype=rows.dtype) / 8
    wanted = rows.T @ (rows * weights.unsqueeze(-1))
    torch.testing.assert_close(moments.covariance[0, 0], wanted, rtol=1e-12, atol=1e-12)
