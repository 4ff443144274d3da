"""Nyström features: exact on their landmarks, bounded by their ridge, and landmarks where the keys are.

Letters: B batch, H heads, L tokens, D head width, R landmarks.
"""

from __future__ import annotations

import itertools
import math

import pytest
import scipy.stats
import torch
from torch import Tensor

import linattn
from linattn.feature_maps import Nystrom, features
from linattn.feature_maps._statistics import kmeans

D = 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gram(nystrom: Nystrom, q: Tensor, k: Tensor) -> Tensor:
    """φ(q)·φ(k) from the features themselves."""
    return features(nystrom, q, "query") @ features(nystrom, k, "key").mT


@pytest.mark.parametrize("scale", [0.4, None])
def test_exact_where_either_side_is_a_landmark(scale: float | None) -> None:
    landmarks, other = normal(2, 9, D, seed=0), normal(2, 5, D, seed=1)
    nystrom = Nystrom(D, 9, scale=scale, ridge=0.0, landmarks=landmarks)
    for q, k in ((other, landmarks), (landmarks, other), (landmarks, landmarks)):
        expected = torch.exp((scale or D**-0.5) * (q @ k.mT))
        torch.testing.assert_close(gram(nystrom, q, k), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(nystrom.kernel(q, k), expected, rtol=1e-9, atol=1e-9)


def test_with_all_keys_as_landmarks_attention_is_softmax_attention() -> None:
    query, key, value = (normal(1, 2, 12, D, seed=seed) for seed in range(3))
    nystrom = Nystrom(D, 12, num_steps=0, ridge=0.0).fit(query, key)
    found = linattn.linear_attention(query, key, value, nystrom)
    torch.testing.assert_close(found, linattn.softmax_attention(query, key, value), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 0.1, 1.0])
def test_features_equal_the_formula(ridge: float) -> None:
    landmarks, q, k = normal(7, D, seed=0), normal(4, D, seed=1), normal(5, D, seed=2)
    z, x, y = (t * D**-0.25 for t in (landmarks, q, k))

    def gaussian(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-(a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1) / 2)

    inverse = torch.linalg.inv(gaussian(z, z) + ridge * torch.eye(7, dtype=torch.float64))
    norms = x.square().sum(-1, keepdim=True) / 2 + y.square().sum(-1) / 2
    expected = torch.exp(norms) * (gaussian(x, z) @ inverse @ gaussian(z, y))
    nystrom = Nystrom(D, 7, ridge=ridge, landmarks=landmarks)
    torch.testing.assert_close(gram(nystrom, q, k), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(nystrom.kernel(q, k), expected, rtol=1e-9, atol=1e-9)


def test_a_coinciding_landmark_without_ridge_changes_nothing() -> None:
    landmarks, q, k = normal(4, D, seed=0), normal(5, D, seed=1), normal(6, D, seed=2)
    twice = torch.cat((landmarks, landmarks))
    expected = Nystrom(D, 4, ridge=0.0, landmarks=landmarks).kernel(q, k)
    found = Nystrom(D, 8, ridge=0.0, landmarks=twice)
    torch.testing.assert_close(found.kernel(q, k), expected, rtol=1e-9, atol=1e-9)
    single = features(found, q.float(), "query") @ features(found, k.float(), "key").mT
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ridge", [0.1, 1.0, 3.0])
def test_the_ridge_bounds_the_features(ridge: float) -> None:
    """|φ(x)|² ≤ exp(|x̃|²)·|g(Z, x)|²/ridge, however close the landmarks."""
    landmarks = normal(1, D, seed=0) + 1e-4 * normal(9, D, seed=1)
    x = 2 * normal(50, D, seed=2)
    phi = features(Nystrom(D, 9, ridge=ridge, scale=1.0, landmarks=landmarks), x, "query")
    to_landmarks = torch.exp(-(x.unsqueeze(-2) - landmarks).square().sum(-1) / 2)
    bound = torch.exp(x.square().sum(-1)) * to_landmarks.square().sum(-1) / ridge
    assert (phi.square().sum(-1) <= bound * (1 + 1e-9)).all()


def test_more_landmarks_or_less_ridge_leave_less_missing() -> None:
    """exp(|x̃|²) - φ(x)·φ(x) is a Schur complement: ≥ 0, falling with every landmark and with the ridge."""
    landmarks, x = normal(12, D, seed=0), normal(30, D, seed=1)
    exact = torch.exp(x.square().sum(-1) / math.sqrt(D))

    def missing(count: int, ridge: float) -> Tensor:
        nystrom = Nystrom(D, count, ridge=ridge, landmarks=landmarks[:count])
        return 1 - nystrom.kernel(x, x).diagonal() / exact

    order = [missing(12, 0.0), missing(12, 0.3), missing(12, 1.0), missing(6, 1.0), missing(2, 1.0)]
    assert (order[0] >= -1e-9).all()
    assert all((less < more).all() for less, more in itertools.pairwise(order))


@pytest.mark.parametrize("length", [0.0, 30.0, 3e3])
def test_no_distance_from_the_landmarks_loses_the_features(length: float) -> None:
    """float32, where exp(-|x - z|²/2) would be 0 from |x - z| = 15 on."""
    nystrom = Nystrom(D, 9, scale=1.0, landmarks=normal(9, D, seed=0))
    x = length * torch.nn.functional.normalize(normal(20, D, seed=1), dim=-1).float()
    phi = nystrom.query(x)
    assert phi.isfinite().all()
    assert (phi.abs().amax(-1) > 1e-3).all()
    torch.testing.assert_close(phi.double(), nystrom.query(x.double()), rtol=1e-3, atol=1e-3)


def test_fewer_keys_than_landmarks() -> None:
    query, key = normal(1, 2, 5, D, seed=0), normal(1, 2, 3, D, seed=1)
    nystrom = Nystrom(D, 8, ridge=0.0).fit(query, key)
    torch.testing.assert_close(
        nystrom.kernel(query, key), torch.exp(query @ key.mT / math.sqrt(D)), rtol=1e-9, atol=1e-9
    )


def test_fit_sees_the_keys_of_each_head_over_the_batch() -> None:
    query, key = normal(2, 4, 5, D, seed=0), normal(2, 2, 9, D, seed=1)
    landmarks = Nystrom(D, 12, num_steps=0, seed=3).fit(query, key).landmarks
    assert landmarks is not None
    for head in range(2):  # 12 of 18 keys, each once: more than a row of the batch has
        same = (landmarks[head].unsqueeze(1) == key[:, head].flatten(0, 1)).all(-1)
        assert (same.sum(-1) == 1).all()
        assert same.sum(0).max() == 1
    assert not torch.equal(landmarks, Nystrom(D, 12, num_steps=0, seed=4).fit(query, key).landmarks)


def test_each_head_has_its_own_landmarks() -> None:
    query, key = normal(1, 2, 9, D, seed=3), normal(1, 2, 9, D, seed=4)
    nystrom = Nystrom(D, 4).fit(query, key)
    for head in range(2):
        alone = Nystrom(D, 4, landmarks=nystrom.landmarks[head])
        torch.testing.assert_close(nystrom.query(query)[:, head], alone.query(query[:, head]))
        torch.testing.assert_close(nystrom.key_log_weight(key)[:, head], alone.key_log_weight(key[:, head]))


def landmarks_of(points: Tensor, count: int, *, seed: int, num_rounds: int) -> Tensor:
    return kmeans(points, torch.ones_like(points[..., 0]), count, seed=seed, num_rounds=num_rounds)


def test_seeding_draws_by_squared_distance() -> None:
    """Points 0, 1 and 3: after 0 comes 1 one time in ten, after 1 or 3 as the squares say; never a point again."""
    draws = 2_000
    points = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64).view(1, 3, 1)
    chosen = torch.cat([landmarks_of(points, 3, seed=seed, num_rounds=0) for seed in range(draws)]).squeeze(-1)
    assert torch.equal(chosen.sort(-1).values, points.squeeze(-1).expand(draws, 3))
    second = {0.0: {1.0: 0.1, 3.0: 0.9}, 1.0: {0.0: 0.2, 3.0: 0.8}, 3.0: {0.0: 9 / 13, 1.0: 4 / 13}}
    expected = {(a, b): draws / 3 * share for a, shares in second.items() for b, share in shares.items()}
    counts = [int(((chosen[:, 0] == a) & (chosen[:, 1] == b)).sum()) for a, b in expected]
    assert scipy.stats.chisquare(counts, list(expected.values())).pvalue > 1e-3


def test_steps_lower_the_squared_distance_to_the_landmarks() -> None:
    points = normal(3, 200, D, seed=0)

    def total(num_steps: int) -> Tensor:
        landmarks = landmarks_of(points, 10, seed=1, num_rounds=num_steps)
        return torch.cdist(points, landmarks).amin(-1).square().sum(-1)

    found = [total(steps) for steps in (0, 1, 2, 5)]
    assert all((after < before).all() for before, after in itertools.pairwise(found))


def test_landmarks_depend_on_the_seed_alone() -> None:
    points = normal(2, 50, D, seed=0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = landmarks_of(points, 8, seed=1, num_rounds=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(landmarks_of(points, 8, seed=1, num_rounds=2), first)
    assert not torch.equal(landmarks_of(points, 8, seed=2, num_rounds=2), first)


def test_a_landmark_without_points_stays() -> None:
    points = torch.zeros(1, 4, 2, dtype=torch.float64)
    assert torch.equal(landmarks_of(points, 3, seed=0, num_rounds=3), torch.zeros(1, 3, 2, dtype=torch.float64))
