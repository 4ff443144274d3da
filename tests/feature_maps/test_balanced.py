"""Balancing keeps q·k, and makes the mean of |x + y|² the smallest that an invertible matrix can.

Letters: B batch, H heads, Hkv key/value heads, G queries' heads of a group, L tokens, D head width.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linattn.feature_maps import (
    Balanced,
    Centred,
    FavorPlus,
    FeatureMap,
    Hyperbolic,
    Oprf,
    Sderf,
    Taylor,
    Trigonometric,
    features,
)

D = 6


def anisotropic(*shape: int, seed: int, spread: float = 3.0) -> Tensor:
    """Tokens with means, and with standard deviations over a factor of `spread` in directions of their own."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(D, D, dtype=torch.float64, generator=generator)
    mixing = torch.linalg.qr(mixing).Q * torch.logspace(-0.5, 0.5, D, base=spread, dtype=torch.float64)
    return torch.randn(*shape, D, dtype=torch.float64, generator=generator) @ mixing.mT + 0.3


def sample(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries of two groups of two heads, and keys: (2, 4, 50, D), (2, 2, 70, D)."""
    return anisotropic(2, 4, 50, seed=seed), anisotropic(2, 2, 70, seed=seed + 100)


def by_group(query: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Queries (B, G·Lq, D) and keys (B, Lk, D) of each key head."""
    return [(query[:, 2 * h : 2 * h + 2].flatten(1, 2), key[:, h]) for h in range(2)]


def mean_square(x: Tensor, y: Tensor) -> float:
    """Mean of |x_i + y_j|² over all pairs of a batch row."""
    return float((x.unsqueeze(-2) + y.unsqueeze(-3)).square().sum(-1).mean())


def moved(balanced: Balanced, query: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The same as the inner map is given it."""
    batch, _, _, dim = query.shape
    x = balanced.inner_query(query.reshape(batch, 2, -1, dim))
    return [(x[:, h], balanced.inner_key(key)[:, h]) for h in range(2)]


@pytest.mark.parametrize("spread", [3.0, 1e4])
def test_products_are_kept(spread: float) -> None:
    query, key = anisotropic(1, 2, 50, seed=0, spread=spread), anisotropic(1, 2, 50, seed=1, spread=spread)
    balanced = Balanced(Taylor(D)).fit(query, key)
    assert not torch.isclose(balanced.inner_query(query), query, rtol=0.1).all()
    for dtype, eps in ((torch.float64, 2.0**-53), (torch.float32, 2.0**-24)):
        q, k = query.to(dtype), key.to(dtype)
        x, y = balanced.inner_query(q), balanced.inner_key(k)
        found, expected = x.double() @ y.double().mT, q.double() @ k.double().mT
        # Rounding of M, M⁻ᵀ and both products, D terms each, magnified by at most the condition number ridge^-½ = 1e3.
        size = (
            torch.linalg.vector_norm(q.double(), dim=-1)[..., None]
            * torch.linalg.vector_norm(k.double(), dim=-1)[..., None, :]
        )
        assert ((found - expected).abs() <= 4 * D * eps * 1e3 * size).all()


@pytest.mark.parametrize(
    "inner",
    [FavorPlus(D, 8), Hyperbolic(D, 8), Trigonometric(D, 8), Oprf(D, 8, mean_square=1.0), Sderf(D, 8), Taylor(D)],
    ids=lambda inner: type(inner).__name__,
)
def test_the_kernel_is_unchanged(inner: FeatureMap) -> None:
    query, key = sample()
    balanced = Balanced(inner).fit(query, key)
    q, k = 0.5 * query[:, :2], 0.5 * key
    products = q @ k.mT / math.sqrt(D)
    expected = 1 + products + products.square() / 2 if isinstance(inner, Taylor) else torch.exp(products)
    torch.testing.assert_close(balanced.kernel(q, k), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", [FavorPlus, Hyperbolic, Trigonometric])
def test_features_are_the_inner_ones_of_moved_inputs(kind: type[FeatureMap]) -> None:
    query, key = sample()
    inner = kind(D, 8)
    balanced = Balanced(inner).fit(query, key)
    assert (balanced.exponential, balanced.nonnegative) == (inner.exponential, inner.nonnegative)
    for h in range(2):
        matrix = balanced.transform[h]
        for side, x, factor in (("query", query[:, :2], matrix), ("key", key, torch.linalg.inv(matrix).mT)):
            expected = features(inner, x[:, h] @ factor.mT, side)
            torch.testing.assert_close(features(balanced, x, side)[:, h], expected, rtol=1e-10, atol=1e-12)


def test_the_mean_square_is_that_of_the_closed_form() -> None:
    """2·tr (Σx^½ Σy Σx^½)^½ + 2·x̄·ȳ; the trace from the eigenvalues of Σx Σy, no root of a matrix being taken."""
    query, key = sample()
    balanced = Balanced(Taylor(D)).fit(query, key)
    after = moved(balanced, query, key)
    for (x, y), (p, r) in zip(by_group(query, key), after, strict=True):
        moments = [torch.einsum("bld,ble->de", side, side) / (side.shape[0] * side.shape[1]) for side in (x, y)]
        trace = torch.linalg.eigvals(moments[0] @ moments[1]).real.sqrt().sum()
        expected = 2 * trace + 2 * (x.mean(1) * y.mean(1)).sum(-1).mean()
        assert mean_square(p, r) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("seed", range(10))
def test_the_mean_square_never_rises(seed: int) -> None:
    query, key = sample(seed)
    balanced = Balanced(Taylor(D)).fit(query, key)
    pairs = zip(by_group(query, key), moved(balanced, query, key), strict=True)
    assert all(mean_square(*after) < mean_square(*before) for before, after in pairs)


def test_no_matrix_of_its_kind_does_better() -> None:
    query, key = sample()
    balanced = Balanced(Taylor(D)).fit(query, key)
    generator = torch.Generator().manual_seed(3)
    for x, y in moved(balanced, query, key):
        best = mean_square(x, y)
        for _ in range(20):
            change = 0.05 * torch.randn(D, D, dtype=torch.float64, generator=generator)
            other = torch.eye(D, dtype=torch.float64) + change
            assert mean_square(x @ other.mT, y @ torch.linalg.inv(other)) > best


def test_second_moments_agree_afterwards() -> None:
    query, key = sample()
    for x, y in moved(Balanced(Taylor(D)).fit(query, key), query, key):
        ours, theirs = (side.flatten(0, 1).mT @ side.flatten(0, 1) / side.flatten(0, 1).shape[0] for side in (x, y))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ridge", [1e-6, 1e-2])
def test_singular_moments_are_guarded(ridge: float) -> None:
    """Queries on one axis and keys on another: M's condition number is at most ridge^-½, and q·k is kept."""
    query, key = (torch.zeros(1, 1, 5, D, dtype=torch.float64) for _ in range(2))
    query[..., 0], key[..., 1] = torch.arange(1, 6), 100.0
    balanced = Balanced(Taylor(D), ridge=ridge).fit(query, key)
    matrix = balanced.transform[0]
    condition = torch.linalg.cond(matrix)
    assert float(condition) == pytest.approx(ridge**-0.5, rel=1e-6)
    q, k = anisotropic(5, seed=0), anisotropic(7, seed=1)
    torch.testing.assert_close(balanced.inner_query(q) @ balanced.inner_key(k).mT, q @ k.mT, rtol=1e-9, atol=1e-9)


def test_a_ridge_that_is_not_needed_changes_nothing() -> None:
    query, key = sample()
    found = [Balanced(Taylor(D), ridge=ridge).fit(query, key).transform for ridge in (1e-12, 1e-6)]
    assert torch.equal(*found)


@pytest.mark.parametrize("zero", [(True, False), (False, True), (True, True)])
def test_a_side_of_zeros_moves_nothing(zero: tuple[bool, bool]) -> None:
    query, key = (0 * x if empty else x for x, empty in zip(sample(), zero, strict=True))
    matrix = Balanced(Taylor(D)).fit(query, key).transform
    expected = torch.eye(D)
    torch.testing.assert_close(matrix, expected.double().expand_as(matrix), rtol=1e-9, atol=1e-9)


def test_a_given_transform_need_not_be_symmetric() -> None:
    matrix = torch.randn(2, D, D, generator=torch.Generator().manual_seed(4)) + 3 * torch.eye(D)
    balanced = Balanced(Taylor(D), transform=matrix)
    q, k = (torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (5, 6))
    torch.testing.assert_close(balanced.inner_query(q), q @ matrix.double().mT)
    torch.testing.assert_close(balanced.inner_query(q) @ balanced.inner_key(k).mT, q @ k.mT, rtol=1e-11, atol=1e-11)


def test_what_is_inside_is_fitted_on_what_it_will_see() -> None:
    query, key = sample()
    centred = Centred(Balanced(Sderf(D, 8))).fit(query, key)
    alone = Sderf(D, 8)
    grouped = query.reshape(2, 2, -1, D) - centred.query_mean
    balanced = Balanced(alone).fit(grouped, key - centred.key_mean)
    torch.testing.assert_close(centred.inner.transform, balanced.transform, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(centred.inner.inner.second_moment, alone.second_moment, rtol=1e-10, atol=1e-12)
    oprf = Balanced(Oprf(D, 8)).fit(query, key)
    expected = sum(mean_square(x, y) for x, y in moved(oprf, query, key)) / 2 / math.sqrt(D)
    assert oprf.inner.mean_square.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", [Oprf, Sderf])
def test_autocast_changes_no_fit(kind: type[FeatureMap]) -> None:
    query, key = (x.float() for x in sample())
    plain = Balanced(kind(D, 8)).fit(query, key)
    with torch.autocast("cpu", torch.bfloat16):
        cast = Balanced(kind(D, 8)).fit(query, key)
    assert cast.fingerprint() == plain.fingerprint()
