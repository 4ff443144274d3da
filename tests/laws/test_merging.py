"""What a merge is: who is merged with whom, and what the merged key conserves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from grid import qkv, tokens
from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.merging import merged, reduced, tilt
from linattn.attention.exact.partitioning import partition, seeds
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
    log_weight = tilt(keys, moments.mean)
    number = partition(keys.key * moments.spread.unsqueeze(2), log_weight, 30, 2)
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


def test_keys_are_measured_by_what_queries_see() -> None:
    """Distances are those of logits in the queries' variances, wherever the keys lie."""
    keys, moments = weighted(num_keys=14, absent=0.0)
    log_weight = tilt(keys, moments.mean)
    number = partition(keys.key * moments.spread.unsqueeze(2), log_weight, 9, 1)
    assert not torch.equal(number, partition(keys.key, log_weight, 9, 1))
    for shift in (0.0, 1e3):
        moved = keys._replace(key=keys.key + shift, bias=keys.bias - shift * moments.mean.sum(-1, keepdim=True))
        wanted = merged(moved, number, moments.mean, 9)
        for x, y in zip(reduced(moved, moments, 9), wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def by_hand(points: Tensor, mass: Tensor, num_clusters: int, rounds: int) -> list[set[int]]:
    """The same rounds, key by key."""
    groups = [{i} for i in range(len(points))]
    for left in reversed(range(rounds)):
        excess = len(groups) - num_clusters
        m = [float(mass[list(g)].sum()) for g in groups]
        at = [(mass[list(g), None] * points[list(g)]).sum(0) / mass[list(g)].sum() for g in groups]
        joins, cost = {}, {}
        for i in range(len(groups)):
            heavier = [j for j in range(len(groups)) if m[j] > m[i]]
            if heavier:
                j = min(heavier, key=lambda j: float((at[i] - at[j]).square().sum()))
                joins[i], cost[i] = j, m[i] * m[j] / (m[i] + m[j]) * float((at[i] - at[j]).square().sum())
        gone = sorted(cost, key=cost.__getitem__)[: excess - (excess // 2 if left else 0)]
        # The lightest first: what they join may go on.
        for i in sorted(gone, key=lambda i: m[i]):
            groups[joins[i]] |= groups[i]
            groups[i] = set()
        groups = [g for g in groups if g]
    return sorted(groups, key=min)


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("num_clusters", [1, 3, 11, 29])
def test_light_keys_join_the_nearest_heavier_ones(num_clusters: int, rounds: int) -> None:
    """The cheapest first, several heads at once."""
    point, mass = tokens(3, 30, 2), tokens(3, 30, seed=1)
    found = partition(point, mass, num_clusters, rounds)
    for head in range(3):
        members = [set((found[head] == c).nonzero().flatten().tolist()) for c in range(num_clusters)]
        assert sorted(members, key=min) == by_hand(point[head], mass[head].exp(), num_clusters, rounds)


def inertia(point: Tensor, number: Tensor, num_clusters: int) -> Tensor:
    """The sums (N,) of squared distances to the clusters' means."""
    member = (number.unsqueeze(1) == torch.arange(num_clusters).unsqueeze(-1)).to(point.dtype)
    mean = member @ point / member.sum(-1, keepdim=True)
    gap = point - mean.gather(1, number.unsqueeze(-1).expand_as(point))
    return gap.square().sum((1, 2))


def one_by_one(point: Tensor, num_clusters: int) -> Tensor:
    """The clusters (n,) of merging the cheapest pair of all by Ward's criterion, again and again."""
    number, centre, mass = torch.arange(len(point)), point.clone(), torch.ones(len(point), dtype=point.dtype)
    for _ in range(len(point) - num_clusters):
        cost = torch.cdist(centre, centre).square() * mass * mass.unsqueeze(-1) / (mass + mass.unsqueeze(-1))
        i, j = divmod(int(cost.fill_diagonal_(torch.inf).argmin()), len(point))
        centre[i] = (mass[i] * centre[i] + mass[j] * centre[j]) / (mass[i] + mass[j])
        mass[i] += mass[j]
        # What is gone is far from all.
        centre[j], number[number == j] = 1e6 * (j + 1), i
    return number.unique(return_inverse=True)[1]


def test_rounds_are_nearly_as_good_as_pairs_one_by_one() -> None:
    """Clusters stand at their means: at their first keys they would be worse by a sixth, of which 0.04 is lost here."""
    point = tokens(40, 60, 2)
    ours = inertia(point, partition(point, torch.zeros(40, 60), 6, 6), 6)
    ward = inertia(point, torch.stack([one_by_one(head, 6) for head in point]), 6)
    assert (ours / ward).mean() < 1.1


def test_what_one_head_of_a_group_attends_to_is_dear() -> None:
    """Two heads that look opposite ways: of three pairs the widest goes, to which neither attends."""
    places = [[9.0, 0.0], [9.0, 1.0], [0.0, 5.0], [0.0, 6.2], [-9.0, 0.0], [-9.0, 1.1]]
    key = torch.tensor(places, dtype=torch.float64).view(1, 1, 6, 2)
    query = torch.tensor([[1.0, 0.1], [-1.0, 0.1], [1.0, -0.1], [-1.0, -0.1]], dtype=torch.float64)
    query = query.view(2, 2, 2).transpose(0, 1).reshape(1, 1, 2, 2, 2)
    moments = QueryMoments.empty(key).add(query, torch.ones(1, 1, 2, dtype=torch.bool), 1.0)
    few = reduced(Tokens(key, key, torch.zeros(1, 1, 6).double()), moments, 5)
    kept = [bool((few.key[0, 0] == key[0, 0, i]).all(-1).any()) for i in range(6)]
    assert kept == [True, True, False, False, True, True]


def test_seeds_are_the_heaviest_and_stand_for_the_others() -> None:
    """Drawn in proportion to the root of their masses; together they have the mass of all."""
    log_mass = tokens(1, 3, 4000, seed=1)
    log_mass[..., ::800] += 9
    log_mass[..., 7::9] = -torch.inf
    place, standing = seeds(log_mass, 50, 400)
    top = log_mass.topk(50)
    assert torch.equal(place[..., :50], top.indices)
    peak = log_mass.amax(-1, keepdim=True)
    torch.testing.assert_close(standing[..., :50] + peak, top.values, rtol=1e-12, atol=1e-12)
    total = log_mass.exp().sum(-1)
    rest = total - top.values.exp().sum(-1)
    # The roots spread by a factor of about e, and each of 350 steps is a draw of its own: 1/√350 of that.
    assert (((standing[..., 50:] + peak).exp().sum(-1) - rest).abs() < 0.2 * rest).all()
    assert not (log_mass.gather(-1, place) == -torch.inf).any()


def test_fewer_keys_than_seeds_are_all_seeds() -> None:
    """However many are absent beside them."""
    log_mass = tokens(1, 2, 100, seed=1)
    log_mass[..., 13:] = -torch.inf
    place, standing = seeds(log_mass, 5, 20)
    for head in range(2):
        there = standing[0, head] != -torch.inf
        assert sorted(place[0, head, there].tolist()) == list(range(13))


def test_far_groups_are_found() -> None:
    """Three far groups are found whatever the masses within, and equal keys cost nothing."""
    place = torch.tensor([0.0, 10.0, 0.1, 30.0, 10.1, 0.2, 30.1, 10.0]).view(1, -1, 1)
    mass = torch.tensor([[0.0, -3.0, -70.0, 2.0, 0.0, 1.0, -9.0, 5.0]])
    found = partition(place, mass, 3, 2)
    assert {tuple((found[0] == c).nonzero().flatten().tolist()) for c in range(3)} == {(0, 2, 5), (1, 4, 7), (3, 6)}
    assert partition(torch.zeros(1, 8, 2), mass, 1, 3).tolist() == [[0] * 8]


def test_keys_that_are_no_numbers_do_not_hang_the_search() -> None:
    point = torch.tensor([torch.nan, 0.0, torch.inf, 1.0]).view(1, 4, 1)
    mass = torch.tensor([[torch.nan, 0.0, torch.inf, 1.0]])
    assert partition(point, mass, 2, 2).max() <= 1


def test_absent_keys_never_merge() -> None:
    keys, moments = weighted()
    log_weight, absent = tilt(keys, moments.mean), keys.bias == -torch.inf
    number = partition(keys.key, log_weight, 5, 2)
    assert (number[absent] == 5).all()
    assert (number[~absent] < 5).all()
    few = reduced(weighted(num_keys=12, absent=0.7)[0], moments, 9)
    assert ((few.bias != -torch.inf).sum(-1) == (weighted(num_keys=12, absent=0.7)[0].bias != -torch.inf).sum(-1)).all()


@pytest.mark.parametrize("sizes", [[50], [1] * 50, [7, 0, 20, 23]], ids=str)
def test_moments_are_those_of_all_queries_however_they_came(sizes: list[int]) -> None:
    """Means and spread of the live queries of a group, times the scale, far from the origin too."""
    query = tokens(2, 2, 3, 50, 4) + 1e4
    live = torch.rand(2, 1, 50, generator=torch.Generator().manual_seed(7)) > 0.3
    moments = QueryMoments.empty(query[:, :, 0])
    for part, seen in zip(query.split(sizes, 3), live.split(sizes, 2), strict=True):
        moments = moments.add(part.masked_fill(~seen[:, :, None, :, None], torch.nan), seen, 0.5)
    for b, h in itertools.product(range(2), range(2)):
        rows = 0.5 * query[b, h][:, live[b, 0]].flatten(0, 1)
        assert moments.weight[b, h] == len(rows) / 3
        own = 0.5 * query[b, h][:, live[b, 0]].mean(1)
        torch.testing.assert_close(moments.means[b, h], own, rtol=1e-12, atol=0)
        torch.testing.assert_close(moments.mean[b, h], rows.mean(0), rtol=1e-12, atol=0)
        wanted = rows.std(0, correction=0)
        torch.testing.assert_close(moments.spread[b, h], wanted, rtol=1e-8, atol=1e-8)


def test_earlier_queries_count_less() -> None:
    """As if they were fewer: 1/e after 150 tokens."""
    early, late = tokens(1, 1, 1, 8, 3), tokens(1, 1, 1, 8, 3, seed=1) + 1
    live = torch.ones(1, 1, 8, dtype=torch.bool)
    moments = QueryMoments.empty(early[:, :, 0]).add(early, live, 1.0).decay(150).add(late, live, 1.0)
    share = 1 / (1 + torch.e)
    mean = share * early.mean(3) + (1 - share) * late.mean(3)
    torch.testing.assert_close(moments.mean, mean[:, :, 0], rtol=1e-12, atol=1e-12)
    rows = torch.cat((early, late), 3)[0, 0, 0] - moments.mean[0, 0]
    weights = torch.tensor([share] * 8 + [1 - share] * 8, dtype=rows.dtype) / 8
    wanted = (weights @ rows.square()).sqrt()
    torch.testing.assert_close(moments.spread[0, 0], wanted, rtol=1e-12, atol=1e-12)
