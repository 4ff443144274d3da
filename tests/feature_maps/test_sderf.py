"""Tilts by direction: unbiased, of the variance in closed form, and Oprf where no direction is special.

Letters: D head width, N draws, m rows.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus, Oprf, Sderf, features
from linattn_lab import variance as closed_form

D = 6
NUM_DRAWS = 20_000


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moments(*eigenvalues: float, seed: int = 1) -> Tensor:
    """A matrix with these eigenvalues and directions of no special kind."""
    basis = torch.linalg.qr(normal(len(eigenvalues), len(eigenvalues), seed=seed)).Q
    return basis * torch.tensor(eigenvalues, dtype=torch.float64) @ basis.mT


SPREAD = (1.2, 0.5, 0.1, 0.05, 0.0, 0.0)


def pairs() -> tuple[Tensor, Tensor]:
    """q and k with q + k along the widest direction, the narrowest, and neither; |q + k|² about 1."""
    basis = torch.linalg.qr(normal(D, D, seed=1)).Q
    sums = torch.stack([basis[:, 0], 0.8 * basis[:, -1], basis.sum(-1) / math.sqrt(D)])
    apart = 0.3 * normal(3, D, seed=2)
    return sums / 2 + apart, sums / 2 - apart


def variance(sderf: Sderf, q: Tensor, k: Tensor) -> Tensor:
    """Variance of the estimates of pairs (N, D) over independent rows, as the map's docstring has it."""
    a, vectors = torch.linalg.eigh(sderf.tilt)
    rho = 1 / (1 - 8 * a)
    squares = ((math.sqrt(sderf.scale) * (q + k)) @ vectors).square()
    exponent = (((1 + rho).square() / (4 * rho)).log() / 2 + rho * squares).sum(-1)
    return torch.expm1(exponent) / sderf.num_rows * sderf.kernel(q, k).diagonal().square()


def estimates(draw: str) -> tuple[Sderf, Tensor]:
    """The map of many draws, and its estimates of the three kernel entries, (N, 3)."""
    sderf = Sderf(D, D + 3, draw=draw, scale=1.0, seed=7, num_heads=NUM_DRAWS, second_moment=moments(*SPREAD))
    q, k = pairs()
    return sderf, (features(sderf, q, "query") * features(sderf, k, "key")).sum(-1)


@pytest.mark.parametrize("draw", ["orthogonal", "iid"])
def test_unbiased_in_every_direction(draw: str) -> None:
    """Mean over draws within 4 standard errors, which are below 1.5 % of the kernel."""
    _, found = estimates(draw)
    q, k = pairs()
    truth = torch.exp((q * k).sum(-1))
    standard_error = found.std(0) / math.sqrt(NUM_DRAWS)
    assert (standard_error < 0.015 * truth).all()
    assert ((found.mean(0) - truth).abs() <= 4 * standard_error).all()


def test_variance_over_draws_of_independent_rows() -> None:
    """Sample variance within 4 of its own standard errors, which are below 5 % of it."""
    sderf, found = estimates("iid")
    sampled, deviations = found.var(0), found - found.mean(0)
    standard_error = ((deviations**4).mean(0) - sampled**2).sqrt() / math.sqrt(NUM_DRAWS)
    assert (standard_error < 0.05 * sampled).all()
    assert ((sampled - variance(sderf, *pairs())).abs() <= 4 * standard_error).all()


def test_variance_of_one_direction_by_hand() -> None:
    """D = 1: A of S = 1, and E[f²]/(E f)² of one Gaussian integral."""
    sderf = Sderf(1, 1, scale=1.0, second_moment=torch.ones(1, 1))  # one row, orthogonal to nothing
    a = (1 - 2 - math.sqrt(17)) / 16
    assert sderf.tilt.item() == pytest.approx(a, rel=1e-14)
    z = 0.75
    # E exp(4a w² + 2√(1 - 4a) w z)·(1 - 4a)·exp(-2 z²/2), divided by the square of exp(z²/2)·exp(-z²/2) = 1.
    second = (1 - 4 * a) / math.sqrt(1 - 8 * a) * math.exp(2 * (1 - 4 * a) / (1 - 8 * a) * z * z - z * z)
    q, k = torch.tensor([[z]]).double(), torch.zeros(1, 1).double()
    assert variance(sderf, q, k).item() == pytest.approx(second - 1, rel=1e-12)


@pytest.mark.parametrize("draw", ["orthogonal", "iid"])
def test_isotropic_moments_give_oprf(draw: str) -> None:
    oprf = Oprf(D, 9, draw=draw, mean_square=3.0, seed=5)
    sderf = Sderf(D, 9, draw=draw, seed=5, second_moment=3.0 / D * torch.eye(D, dtype=torch.float64))
    torch.testing.assert_close(sderf.tilt, oprf.tilt * torch.eye(D).double(), rtol=1e-13, atol=1e-15)
    q, k = normal(4, D, seed=3), normal(4, D, seed=4)
    torch.testing.assert_close(sderf.query(q), oprf.query(q), rtol=1e-12, atol=1e-12)
    if draw == "iid":
        torch.testing.assert_close(
            variance(sderf, q, k), closed_form.variance(oprf, q, k).diagonal(), rtol=1e-10, atol=0
        )


def test_nothing_to_tilt_gives_favor_plus() -> None:
    sderf, favor, x = Sderf(D, 9, second_moment=torch.zeros(D, D)), FavorPlus(D, 9), normal(4, D, seed=3)
    torch.testing.assert_close(sderf.query(x), favor.query(x), rtol=1e-13, atol=1e-13)


# log of the second moment at its own mean, s = 16 spread evenly over so many directions of D = 64.
CONCENTRATION = {64: 11.6, 32: 9.6, 16: 7.5, 8: 5.5, 4: 3.8, 2: 2.5, 1: 1.6}


@pytest.mark.parametrize("num_directions", CONCENTRATION)
def test_concentration_lowers_the_variance(num_directions: int) -> None:
    """Figures derived apart from this code, to the printed digit."""
    eigenvalues = torch.zeros(64, dtype=torch.float64)
    eigenvalues[:num_directions] = 16 / num_directions
    sderf = Sderf(64, 4, draw="iid", scale=1.0, second_moment=eigenvalues.diag())
    q, k = eigenvalues.sqrt().unsqueeze(0), torch.zeros(1, 64, dtype=torch.float64)
    found = math.log1p(4 * variance(sderf, q, k).item())  # the kernel is 1
    assert abs(found - CONCENTRATION[num_directions]) <= 0.051


def test_each_tilt_minimises_the_variance_where_its_moments_are() -> None:
    at = torch.tensor([SPREAD], dtype=torch.float64).sqrt()

    def variance_of(eigenvalues: list[float]) -> float:
        matrix = torch.tensor(eigenvalues, dtype=torch.float64).diag()
        sderf = Sderf(D, 4, draw="iid", scale=1.0, second_moment=matrix)
        return variance(sderf, at, torch.zeros_like(at)).item()

    best = variance_of(list(SPREAD))
    for direction in range(4):
        for factor in (0.9, 1.1):
            other = [x * (factor if i == direction else 1) for i, x in enumerate(SPREAD)]
            assert variance_of(other) > best


def test_fit_measures_the_pairs_of_each_key_head() -> None:
    query, key = normal(2, 6, 5, D, seed=3) + 0.4, normal(2, 3, 7, D, seed=4) - 0.2
    sderf = Sderf(D, 8, scale=0.3).fit(query, key)
    assert sderf.second_moment is not None
    for head in range(3):
        x, y = query[:, 2 * head : 2 * head + 2].flatten(1, 2), key[:, head]
        sums = (x.unsqueeze(-2) + y.unsqueeze(-3)).flatten(0, -2)
        torch.testing.assert_close(sderf.second_moment[head], 0.3 * sums.mT @ sums / len(sums), rtol=1e-12, atol=1e-13)


def test_each_head_has_its_own_tilt() -> None:
    query, key = normal(1, 2, 9, D, seed=3), normal(1, 2, 9, D, seed=4) * torch.tensor([1.0, 3.0]).view(2, 1, 1)
    sderf = Sderf(D, 8).fit(query, key)
    for head in range(2):
        alone = Sderf(D, 8).fit(query[:, head : head + 1], key[:, head : head + 1])
        torch.testing.assert_close(sderf.key(key)[:, head], alone.key(key[:, head]), rtol=1e-12, atol=1e-12)
    assert not torch.isclose(sderf.tilt[0], sderf.tilt[1]).all()


def test_a_redraw_keeps_the_moments() -> None:
    first = Sderf(D, 8, seed=1, second_moment=moments(*SPREAD))
    second = Sderf(D, 8, second_moment=moments(*SPREAD)).redraw(1)
    x = normal(4, D, seed=3)
    assert repr(first) == repr(second)
    assert torch.equal(first.query(x), second.query(x))


def test_a_projection_swapped_from_outside_is_used() -> None:
    feature_map, other = (Sderf(D, 8, seed=seed, second_moment=moments(*SPREAD)) for seed in (0, 1))
    host = torch.nn.Module()
    host.map = feature_map
    host.forward = lambda x: host.map.query(x)
    x = normal(4, D, seed=3)
    found = torch.func.functional_call(host, {"map.projection": other.projection.clone()}, (x,))
    torch.testing.assert_close(found, other.query(x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("size", [1e5, 1e10, 1e30])
def test_wide_samples_leave_finite_features(size: float) -> None:
    """Of fewer tokens than directions, some of which have no spread at all."""
    sample = size * normal(1, 1, 3, D, seed=5).float()
    sderf = Sderf(D, 8).fit(sample, sample)
    assert sderf.query(normal(4, D, seed=6)).isfinite().all()
