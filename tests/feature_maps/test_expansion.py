"""Expansions: exact at the centre and as the order grows, centred on what is seen, fitted where queries are.

Letters: B batch, H heads, L tokens, D head width, C centres.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import linattn
from linattn.feature_maps import Centred, Expansion, features
from linattn.feature_maps._fitted import kmeans, means, nearest

D = 6


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def error(expansion: Expansion, query: Tensor, key: Tensor, value: Tensor) -> float:
    exact = linattn.softmax_attention(query, key, value)
    return float((linattn.linear_attention(query, key, value, expansion) - exact).norm() / exact.norm())


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_query_at_a_centre_is_exact(order: int, is_causal: bool) -> None:
    centres = normal(4, D, scale=2.0)
    query = centres[torch.arange(20) % 4].expand(1, 2, 20, D)
    key, value = normal(1, 2, 20, D, seed=1, scale=2.0), normal(1, 2, 20, 3, seed=2)
    expansion = Expansion(D, 4, order=order, centres=centres)
    options = {"is_causal": is_causal}
    found = linattn.linear_partial(query, key, value, expansion, **options)
    truth = linattn.softmax_partial(query, key, value, **options)
    torch.testing.assert_close(found.out, truth.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_normalizer, truth.log_normalizer, rtol=1e-12, atol=1e-12)


def test_the_error_falls_as_the_order_s_power_of_the_step() -> None:
    """Half the step, a half, a quarter, an eighth of the error: the first term left out."""
    key, value, centre = normal(1, 1, 50, D, seed=1), normal(1, 1, 50, 3, seed=2), normal(1, D, seed=3)
    direction = normal(1, 1, 10, D, seed=4)
    for order in (0, 1, 2):
        expansion = Expansion(D, 1, order=order, centres=centre)
        far, close = (error(expansion, centre + step * direction, key, value) for step in (2e-2, 1e-2))
        # The next term is smaller by one more step: 1e-2 times a few.
        assert math.log2(far / close) == pytest.approx(order + 1, abs=0.1)


def test_the_log_normaliser_is_that_of_the_centre_moved_along_the_mean_key() -> None:
    """log Σ exp(c·k) + δ·k̄, and at order 2 log(1 + Var(δ·k)/2) more: the exact one to the same order."""
    query, key, value = normal(1, 1, 5, D, scale=0.1), normal(1, 1, 40, D, seed=1), normal(1, 1, 40, 2, seed=2)
    exact = linattn.softmax_partial(query, key, value).log_normalizer
    p = torch.softmax(torch.zeros(40, dtype=torch.float64), 0)
    step = query * D**-0.5 @ key.mT
    mean = (p * step).sum(-1)
    variance = (p * step.square()).sum(-1) - mean.square()
    expected = {1: math.log(40) + mean, 2: math.log(40) + mean + torch.log1p(variance / 2)}
    for order, truth in expected.items():
        expansion = Expansion(D, 1, order=order, centres=torch.zeros(1, D, dtype=torch.float64))
        found = linattn.linear_partial(query, key, value, expansion).log_normalizer
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
        assert ((found - exact).abs() < 0.05).all()


def test_more_centres_and_higher_orders_err_less() -> None:
    query, key, value = normal(1, 2, 300, D), normal(1, 2, 300, D, seed=1), normal(1, 2, 300, 4, seed=2)
    by_order = [error(Expansion(D, 8, order=order), query, key, value) for order in (0, 1, 2)]
    by_count = [error(Expansion(D, count), query, key, value) for count in (1, 4, 16, 64)]
    for errors in (by_order, by_count):
        assert all(after < before for before, after in itertools.pairwise(errors))


def test_moving_all_keys_changes_nothing() -> None:
    """Softmax does not see it, nor does the expansion around the keys' mean."""
    query, key, value = normal(1, 1, 30, D), normal(1, 1, 30, D, seed=1), normal(1, 1, 30, 2, seed=2)
    for order in (0, 1, 2):
        expansion = Expansion(D, 3, order=order).fit(query, key)
        moved = linattn.linear_attention(query, key + 5.0, value, expansion)
        torch.testing.assert_close(moved, linattn.linear_attention(query, key, value, expansion), rtol=1e-9, atol=1e-9)


def test_a_long_step_is_shortened_to_the_spread_at_order_1() -> None:
    """MapPart from the only centre the weights are those of 1.5 standard deviations, whatever the distance."""
    sample, key = normal(1, 1, 200, D), normal(1, 1, 200, D, seed=1)
    value, direction = normal(1, 1, 200, 2, seed=2), normal(1, 1, 1, D, seed=3)
    expansion = Expansion(D, 1).fit(sample, key)
    centre = expansion.centres
    unit = direction / (direction.norm() * expansion.spread * D**-0.5)
    at, beyond, within = (
        linattn.linear_attention(centre + length * unit, key, value, expansion) for length in (1.5, 30.0, 0.75)
    )
    torch.testing.assert_close(beyond, at, rtol=1e-10, atol=1e-10)
    mean = linattn.linear_attention(centre.expand(1, 1, 1, D), key, value, expansion)
    torch.testing.assert_close(within - mean, (at - mean) / 2, rtol=1e-10, atol=1e-10)
    assert float(expansion.spread) == pytest.approx(float((key - key.mean(2, True)).square().mean().sqrt()), rel=1e-12)


def test_features_are_the_kernel() -> None:
    query, key = normal(1, 2, 7, D), normal(1, 2, 9, D, seed=1)
    for order in (0, 1, 2):
        expansion = Expansion(D, 3, order=order).fit(query, key)
        product = features(expansion, query, "query") @ features(expansion, key, "key").mT
        torch.testing.assert_close(product, expansion.kernel(query, key), rtol=1e-11, atol=1e-11)


def test_clusters_are_those_of_the_keys_metric() -> None:
    """Queries spread widely where keys do not vary are one cluster: distance there costs nothing."""
    query = torch.stack((normal(400, scale=100.0), torch.arange(400).double() % 2), -1).view(1, 1, 400, 2)
    key = normal(1, 1, 500, 2, seed=1) * torch.tensor([1e-4, 1.0], dtype=torch.float64)
    centres = Expansion(2, 2).fit(query, key).centres
    assert centres[:, 1].sort().values.tolist() == pytest.approx([0.0, 1.0], abs=1e-9)


def test_each_head_has_centres_of_its_own_and_groups_share_them() -> None:
    query, key = normal(2, 4, 50, D), normal(2, 2, 50, D, seed=1)
    query[:, 2:] += 3.0
    fitted = Expansion(D, 3).fit(query, key)
    assert fitted.centres.shape == (2, 3, D)
    assert (fitted.centres[1] - fitted.centres[0]).mean() > 2
    alone = Expansion(D, 3).fit(query[:, 2:], key[:, 1:])
    torch.testing.assert_close(alone.centres, fitted.centres[1], rtol=1e-12, atol=1e-12)


def test_a_fit_depends_on_its_seed_alone() -> None:
    query, key = normal(1, 2, 80, D), normal(1, 2, 80, D, seed=1)
    state = torch.get_rng_state()
    first, again, other = (Expansion(D, 8).fit(query, key, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(first) == repr(again) != repr(other)


def test_keys_that_are_all_alike_are_no_trouble() -> None:
    query, key, value = normal(1, 1, 20, D), torch.ones(1, 1, 20, D).double(), normal(1, 1, 20, 2, seed=2)
    for order in (0, 1, 2):
        found = linattn.linear_attention(query, key, value, Expansion(D, 3, order=order))
        torch.testing.assert_close(found, value.mean(2, keepdim=True).expand_as(found), rtol=1e-9, atol=1e-9)


def test_points_without_weight_move_no_centre() -> None:
    points = normal(2, 60, 3)
    weight = (torch.arange(60) < 40).double().expand(2, 60)
    noisy = torch.where(weight.unsqueeze(-1) > 0, points, 1e6)
    full, among = (
        kmeans(x, w, 4, seed=1, num_rounds=5) for x, w in ((points[:, :40], weight[:, :40]), (noisy, weight))
    )
    torch.testing.assert_close(among, full, rtol=1e-12, atol=1e-12)
    cluster = nearest(points, full)
    for number in range(4):
        mine = points[0][(cluster[0] == number) & (weight[0] > 0)]
        found = means(points, weight, cluster, full)[0, number]
        torch.testing.assert_close(found, mine.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Expansion(D, 0), "num_centres must be an integer of at least 1, got 0"),
        (lambda: Expansion(D, 2, order=3), "order must be 0, 1 or 2, got 3"),
        (lambda: Expansion(D, 2, centres=torch.zeros(3, D)), r"centres must be \(Hkv, 2, 6\) or \(2, 6\)"),
        (lambda: Expansion(D, 2).query(torch.zeros(1, D)), "has no centres: call fit"),
        (lambda: Expansion(D, 2).fit(normal(1, 3, 4, D), normal(1, 2, 4, D)), "H a multiple of Hkv"),
    ],
)
def test_refusals(build, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_unfitted_centres_do_not_leak_the_future() -> None:
    query = normal(1, 1, 8, D)
    with pytest.raises(ValueError, match="leak the future"):
        linattn.linear_attention(query, query, query, Expansion(D, 2), is_causal=True)
    with pytest.raises(TypeError, match="use it as it is"):
        Centred(Expansion(D, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_autocast_changes_no_fit(order: int, dtype: torch.dtype) -> None:
    """Queries far from 0: products in bfloat16 would find other clusters."""
    query, key = (4 * normal(2, 4, 200, D) + 30).to(dtype), normal(2, 4, 200, D, seed=1).to(dtype)
    for seed in (0, 3):
        plain, cast = Expansion(D, 8, order=order).fit(query, key, seed=seed), Expansion(D, 8, order=order)
        with torch.autocast("cpu", torch.bfloat16):
            cast.fit(query, key, seed=seed)
        assert cast.fingerprint() == plain.fingerprint()
        assert all(map(torch.equal, cast.buffers(), plain.buffers()))
