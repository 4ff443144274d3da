"""What a merge is: who is merged with whom, and what the merged key conserves."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from grid import qkv, tokens
from linattn.kv_cache.merging import reduced
from linattn.kv_cache.partitioning import partition, seeds
from linattn.kv_cache.query_sample import QuerySample, sample_size
from linattn.softmax.tokens import Tokens


def weighted(num_keys: int = 40, absent: float = 0.2, num_queries: int = 50) -> tuple[Tokens, QuerySample]:
    """Weighted keys, some of them absent, and a sample of queries that lie apart from 0, some of them absent."""
    query, key, value = qkv(num_queries=num_queries, num_keys=num_keys)
    bias = tokens(2, 2, num_keys, seed=5)
    draw = torch.Generator().manual_seed(6)
    gone = torch.rand(bias.shape, generator=draw) < absent
    there = torch.rand(2, 2, num_queries, generator=draw) >= absent
    query = torch.where(there.unsqueeze(-1), query[:, :2] + 0.5, 0)
    return Tokens(key, value, bias.masked_fill(gone, -torch.inf)), QuerySample(query, there)


def attention(sample: QuerySample, keys: Tokens) -> Tensor:
    """Weights (B, H, S, n) before they are divided by their sum."""
    logits = sample.query @ keys.key.mT + keys.bias.unsqueeze(2)
    return torch.where(sample.there.unsqueeze(-1), logits, -torch.inf).exp()


def test_masses_of_keys_that_the_sample_hardly_sees_do_not_underflow() -> None:
    """In float32 as in float64: later queries may see such keys, and read them by their biases."""
    keys, sample = weighted(absent=0.0)
    strong = QuerySample(100 * sample.query, sample.there)
    wanted = strong.attends(keys)
    assert wanted.log_mass.min() < 2 * math.log(torch.finfo(torch.float32).tiny)
    rounded = QuerySample(strong.query.float(), strong.there).attends(Tokens(*(x.float() for x in keys)))
    # Logits are sums of D products, and each mass is of differences of two.
    largest = strong.query.norm(dim=-1).max() * keys.key.norm(dim=-1).max() + keys.bias.abs().max()
    atol = float(2 * (keys.key.shape[-1] + 2) * torch.finfo(torch.float32).eps * largest)
    torch.testing.assert_close(rounded.log_mass.double(), wanted.log_mass, rtol=0, atol=atol)


@pytest.mark.parametrize("num_queries", [1, 50])
@pytest.mark.parametrize("num_merged", [1, 5, 33, 40])
def test_a_merge_conserves_what_the_sample_reads(num_merged: int, num_queries: int) -> None:
    """Attention to each cluster and the values that come of it; of one query its denominator and its numerator."""
    keys, sample = weighted(num_queries=num_queries)
    few = reduced(keys, sample, num_merged)[0]
    assert few.bias.shape[2] == num_merged
    total = attention(sample, keys).sum(-1, keepdim=True)
    total = torch.where(sample.there.unsqueeze(-1), total, 1)
    found, truth = attention(sample, few) / total, attention(sample, keys) / total
    torch.testing.assert_close(found.sum((2, 3)), truth.sum((2, 3)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((found @ few.value).sum(2), (truth @ keys.value).sum(2), rtol=1e-12, atol=1e-12)


def test_where_no_query_is_there_all_keys_are_worth_the_same() -> None:
    """As before a stream's first query: merged keys weigh what their members do to a query of 0."""
    keys, sample = weighted()
    for none in (QuerySample.empty(keys.key), sample._replace(there=torch.zeros_like(sample.there))):
        few = reduced(keys, none._replace(query=torch.zeros_like(none.query)), 5)[0]
        torch.testing.assert_close(few.bias.logsumexp(-1), keys.bias.logsumexp(-1), rtol=1e-12, atol=1e-12)
        mean = torch.softmax(few.bias, -1).unsqueeze(2) @ few.value
        truth = torch.softmax(keys.bias, -1).unsqueeze(2) @ keys.value
        torch.testing.assert_close(mean, truth, rtol=1e-12, atol=1e-12)


def test_keys_that_stay_alone_are_the_same_to_the_bit() -> None:
    """However often a stream looks at them, in float32 too."""
    keys, sample = weighted(absent=0.0)
    keys, sample = Tokens(*(x.float() for x in keys)), sample._replace(query=sample.query.float())
    (few, member), alone = reduced(keys, sample, 30), 0
    for b, h, j in itertools.product(range(2), range(2), range(40)):
        same = (few.key[b, h] == keys.key[b, h, j]).all(-1)
        for c in same.nonzero().flatten().tolist():
            alone += 1
            assert torch.equal(few.value[b, h, c], keys.value[b, h, j])
            assert torch.equal(few.bias[b, h, c], keys.bias[b, h, j])
            assert member[b, h, c] == j
    # Ten of 40 keys join others, those of twenty clusters at least are alone.
    assert alone >= 4 * 20


def test_keys_are_measured_by_what_queries_see() -> None:
    """A wide pair that queries hardly tell apart goes before a narrow one that they do, wherever the keys lie."""
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.6]], dtype=torch.float64)
    query = torch.tensor([[0.05, 1.0], [0.05, -1.0], [-0.05, 1.0], [-0.05, -1.0]], dtype=torch.float64)
    sample = QuerySample(query.view(1, 1, 4, 2), torch.ones(1, 1, 4, dtype=torch.bool))
    for shift in (0.0, 1e3):
        key = (places + shift).view(1, 1, 4, 2)
        few = reduced(Tokens(key, torch.zeros_like(key), torch.zeros(1, 1, 4).double()), sample, 3)[0]
        found = (few.key[0, 0] - shift).round(decimals=6).tolist()
        assert [0.0, 2.0] in found
        assert [0.0, 2.6] in found
        assert any(0 < x < 1 and y == 0 for x, y in found)


@pytest.mark.parametrize("kind", ["none", "absent", "one", "alike"])
def test_queries_that_tell_no_coordinates_apart_leave_keys_near_each_other_together(kind: str) -> None:
    """Each counts as much then: of pairs of keys, of any masses, all others stay apart."""
    centre, shift = tokens(2, 2, 8, 5, seed=1).float(), 0.01 * tokens(2, 2, 16, 5, seed=2).float()
    key = 10 * centre.repeat_interleave(2, 2) + shift
    query = torch.full((2, 2, {"one": 1}.get(kind, 11), 5), 0.1)
    there = torch.full(query.shape[:3], kind != "absent")
    sample = QuerySample.empty(key) if kind == "none" else QuerySample(query * there.unsqueeze(-1), there)
    few = reduced(Tokens(key, torch.ones_like(key), tokens(2, 2, 16, seed=3).float()), sample, 8)[0]
    distance = torch.cdist(few.key, 10 * centre)
    assert (distance.amin(-1) < 0.2).all()
    assert (distance.argmin(-1).sort(-1).values == torch.arange(8)).all()


def test_values_that_differ_by_rounding_alone_keep_no_keys_apart() -> None:
    centre, noise = tokens(1, 2, 8, 5, seed=1).float(), tokens(1, 2, 16, 5, seed=2).float()
    key, value = centre.repeat_interleave(2, 2) + 0.01 * noise, 3 * (1 + 1e-7 * noise.flip(2))
    query = tokens(1, 2, 30, 5, seed=3).float()
    sample = QuerySample(query, torch.ones(query.shape[:3], dtype=torch.bool))
    few = reduced(Tokens(key, value, torch.zeros(1, 2, 16)), sample, 8)[0]
    assert (torch.cdist(few.key, centre).argmin(-1).sort(-1).values == torch.arange(8)).all()


def test_values_keep_keys_apart() -> None:
    """Of keys that queries hardly tell apart, those of like values go together."""
    key = torch.zeros(1, 1, 5, 2, dtype=torch.float64)
    key[..., 0] = torch.tensor([0.0, 0.1, 0.0, 0.1, 5.0])
    value = torch.tensor([0.0, 0.0, 9.0, 9.0, 4.5], dtype=torch.float64).view(1, 1, 5, 1)
    query = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64).view(1, 1, 2, 2)
    sample = QuerySample(query, torch.ones(1, 1, 2, dtype=torch.bool))
    few = reduced(Tokens(key, value, torch.zeros(1, 1, 5).double()), sample, 3)[0]
    assert sorted(few.value.flatten().tolist()) == pytest.approx([0.0, 4.5, 9.0])


@pytest.mark.parametrize("num_absent", [0, 300])
def test_along_axes_the_same_keys_merge(num_absent: int) -> None:
    """Where keys and values have no more directions than there are axes, whatever absent keys hold."""
    query, sides = tokens(1, 2, 30, 40, seed=1), tokens(1, 2, 15, 80, seed=2)
    both = 3 + tokens(1, 2, 900, 15, seed=3) @ sides
    bias = torch.zeros(1, 2, 900, dtype=torch.float64)
    bias[:, :, :num_absent] = -torch.inf
    both[:, :, :num_absent] = 1e3 * tokens(1, 2, num_absent, 80, seed=4)
    given, sample = Tokens(both[..., :40], both[..., 40:], bias), QuerySample(query, query[..., 0] < torch.inf)
    whole, member = (reduced(given, sample, 500, 100, along_axes=each)[1] for each in (False, True))
    assert torch.equal(member, whole)
    assert (member == 900).any()


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
    sample = QuerySample(query.view(1, 1, 4, 2), torch.ones(1, 1, 4, dtype=torch.bool))
    few = reduced(Tokens(key, torch.zeros_like(key), torch.zeros(1, 1, 6).double()), sample, 5)[0]
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
    keys, sample = weighted()
    absent = keys.bias == -torch.inf
    number = partition(keys.key, keys.bias, 5, 2)
    assert (number[absent] == 5).all()
    assert (number[~absent] < 5).all()
    few = weighted(num_keys=12, absent=0.7)[0]
    found = reduced(few, sample, 9)[0]
    assert ((found.bias != -torch.inf).sum(-1) == (few.bias != -torch.inf).sum(-1)).all()


@pytest.mark.parametrize("cuts", [[], list(range(1, 64)), [7, 7, 27, 50]], ids=str)
@pytest.mark.parametrize(("block", "groups"), [(16, 3), (64, 2), (13, 1), (3, 2), (16, 16)])
def test_the_sample_is_the_same_however_queries_came(block: int, groups: int, cuts: list[int]) -> None:
    """The latest of each block's, heads in turn, times the scale; those of masked tokens are not there."""
    query, live = tokens(2, 2, groups, 64, 4), torch.rand(2, 1, 64, generator=torch.Generator().manual_seed(7)) > 0.3
    sample = QuerySample.empty(query[:, :, 0])
    ends = sorted({*cuts, *range(block, 64, block), 64})
    for start, stop in itertools.pairwise([0, *ends]):
        rows = query[:, :, :, start:stop].masked_fill(~live[:, :, None, start:stop, None], torch.nan)
        sample = sample.add(rows, live[:, :, start:stop], 0.5, block=block, first=start % block)
    if block < max(8, groups):
        wanted = list(itertools.product(range(64), range(groups)))
    else:
        stride = block // max(8, groups)
        wanted = [
            (begin + (n + 1) * stride - 1, n % groups) for begin in range(0, 64, block) for n in range(max(8, groups))
        ]
        wanted = [(token, head) for token, head in wanted if token < 64]
    wanted = wanted[-sample_size(groups) :]
    assert {head for _, head in wanted} == set(range(groups))
    assert sample.query.shape[2] == len(wanted)
    for place, (token, head) in enumerate(wanted):
        seen = live[:, :, token].expand(2, 2)
        assert torch.equal(sample.there[:, :, place], seen)
        assert torch.equal(sample.query[:, :, place], torch.where(seen[..., None], 0.5 * query[:, :, head, token], 0))
    rows = sample.query[0, 1, sample.there[0, 1]]
    torch.testing.assert_close(sample.spread[0, 1], rows.std(0, correction=0), rtol=1e-12, atol=1e-12)
