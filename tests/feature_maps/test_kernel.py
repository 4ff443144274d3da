"""φ(q)·φ(k) is the kernel: to rounding for exact maps, in the mean over draws for random ones.

Letters: L tokens, D head width, N draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.integrate
import torch
from torch import Tensor

from linattn.feature_maps import (
    Dpfp,
    ElementwisePolynomial,
    EluPlusOne,
    Exponential,
    FavorPlus,
    FeatureMap,
    Hyperbolic,
    Identity,
    Oprf,
    RandomRelu,
    Relu,
    Taylor,
    TensorPolynomial,
    Trigonometric,
    features,
)
from linattn.feature_maps.random_base import RandomFeatureMap

D = 8
NUM_DRAWS = 4000


def gram(feature_map: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    """φ(q)·φ(k) from the features themselves."""
    return features(feature_map, q, "query") @ features(feature_map, k, "key").mT


def coordinates(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel Σ_l function(q_l, k_l)."""
    return lambda q, k: function(q.unsqueeze(-2), k.unsqueeze(-3)).sum(-1)


def elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(x))


def dpfp_by_loops(q: Tensor, k: Tensor) -> Tensor:
    """Σ over rolls j = 1, 2 and places i of the products r_i·r_{i-j} of both sides."""
    r, t = (torch.cat((x.clamp(min=0), (-x).clamp(min=0)), -1) for x in (q, k))
    total = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=q.dtype)
    for j in (1, 2):
        for i in range(2 * D):
            total += (r[..., i] * r[..., i - j]).unsqueeze(-1) * (t[..., i] * t[..., i - j]).unsqueeze(-2)
    return total


EXACT = {
    "exponential": (Exponential(D), coordinates(lambda q, k: torch.exp((q + k) / math.sqrt(D)))),
    "elu + 1": (EluPlusOne(D), coordinates(lambda q, k: elu_plus_one(q) * elu_plus_one(k))),
    "relu": (Relu(D, floor=0.1), coordinates(lambda q, k: (q.clamp(min=0) + 0.1) * (k.clamp(min=0) + 0.1))),
    "powers": (
        ElementwisePolynomial(D, degree=3),
        coordinates(lambda q, k: (q * k / D + (q + k) / math.sqrt(D) + 1) ** 3),
    ),
    "identity": (Identity(D), lambda q, k: q @ k.mT),
    "dpfp": (Dpfp(D, nu=2), dpfp_by_loops),
    "square": (TensorPolynomial(D), lambda q, k: (q @ k.mT / math.sqrt(D) + 1) ** 2),
    "cube": (TensorPolynomial(D, degree=3, constant=0.5, scale=0.3), lambda q, k: (0.3 * (q @ k.mT) + 0.5) ** 3),
    "fourth power": (TensorPolynomial(D, degree=4, constant=0.0, scale=2.0), lambda q, k: (2 * (q @ k.mT)) ** 4),
    "linear": (TensorPolynomial(D, degree=1), lambda q, k: q @ k.mT / math.sqrt(D) + 1),
    "Taylor 1": (Taylor(D, order=1), lambda q, k: 1 + q @ k.mT / math.sqrt(D)),
    "Taylor 2": (
        Taylor(D, scale=0.7),
        lambda q, k: 1 + 0.7 * (q @ k.mT) + 0.49 * (q @ k.mT).square() / 2,
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_kernels(name: str) -> None:
    feature_map, truth = EXACT[name]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, length, D, dtype=torch.float64, generator=generator) for length in (5, 7))
    expected = truth(q, k)
    # Cancellation is judged against the sum of absolute products, which rounding is proportional to.
    size = features(feature_map, q, "query").abs() @ features(feature_map, k, "key").abs().mT
    assert ((gram(feature_map, q, k) - expected).abs() <= 1e-12 * size).all()
    assert ((feature_map.kernel(q, k) - expected).abs() <= 1e-12 * size).all()
    assert features(feature_map, q, "query").shape == (2, 3, 5, feature_map.num_features)


@pytest.mark.parametrize("degree", [20, 21, 67, 100])
@pytest.mark.parametrize("constant", [0.0, 0.5])
def test_powers_whose_factors_are_beyond_int64(degree: int, constant: float) -> None:
    feature_map = TensorPolynomial(1, degree=degree, constant=constant, scale=1.0)
    q, k = torch.tensor([[0.9], [-1.1]], dtype=torch.float64), torch.tensor([[1.2]], dtype=torch.float64)
    size = features(feature_map, q, "query").abs() @ features(feature_map, k, "key").abs().mT
    assert ((gram(feature_map, q, k) - (q @ k.mT + constant) ** degree).abs() <= 1e-12 * size).all()


@pytest.mark.parametrize(
    ("feature_map", "count"),
    [
        (TensorPolynomial(5, degree=3), math.comb(8, 3)),
        (TensorPolynomial(5, degree=3, constant=0.0), math.comb(7, 3)),
        (Taylor(5), 21),
        (Taylor(5, order=1), 6),
        (Dpfp(5, nu=3), 30),
    ],
)
def test_each_monomial_is_stored_once(feature_map: FeatureMap, count: int) -> None:
    assert feature_map.num_features == count
    assert feature_map.query(torch.ones(2, 5)).shape == (2, count)


@pytest.mark.parametrize("name", EXACT)
def test_nonnegative_maps_have_nonnegative_kernels(name: str) -> None:
    feature_map, _ = EXACT[name]
    generator = torch.Generator().manual_seed(1)
    q, k = (4 * torch.randn(200, D, dtype=torch.float64, generator=generator) for _ in range(2))
    smallest = feature_map.kernel(q, k).min().item()
    assert (smallest >= 0) == feature_map.nonnegative


def directions() -> dict[str, Tensor]:
    """Unit vectors in which a draw may be biased: both signs of 1, one axis, any."""
    ones = torch.ones(D, dtype=torch.float64) / math.sqrt(D)
    random = torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return {
        "ones": ones,
        "minus ones": -ones,
        "axis": torch.eye(D, dtype=torch.float64)[-1],
        "random": random / random.norm(),
    }


RANDOM: dict[str, Callable[..., RandomFeatureMap]] = {
    "FavorPlus": FavorPlus,
    "Hyperbolic": Hyperbolic,
    "Trigonometric": Trigonometric,
    "Oprf": lambda *args, **options: Oprf(*args, mean_square=1.5, **options),
    "RandomRelu": lambda *args, **options: RandomRelu(*args, floor=0.1, **options),
}
KINDS = [(name, "chi") for name in RANDOM] + [(name, "fixed") for name in ("FavorPlus", "Hyperbolic", "RandomRelu")]


@pytest.mark.parametrize("num_rows", [5, D, 2 * D + 3])
@pytest.mark.parametrize("draw", ["orthogonal", "iid"])
@pytest.mark.parametrize(("name", "lengths"), KINDS)
def test_random_kernels_are_unbiased(name: str, draw: str, lengths: str, num_rows: int) -> None:
    """Mean over draws within 4 standard errors, for |x + y|² = 2 (or |x - y|² = 2 for cosines) in every direction."""
    per_row = 2 if name in ("Hyperbolic", "Trigonometric") else 1
    options = {"lengths": lengths} if lengths == "fixed" else {}
    feature_map = RANDOM[name](
        D, per_row * num_rows, draw=draw, scale=1.0, num_heads=NUM_DRAWS, seed=num_rows, **options
    )
    apart = 0.3 * torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    half = torch.stack([math.sqrt(2) / 2 * u for u in directions().values()])
    q, k = half + apart, half - apart
    if name == "Trigonometric":
        k = -k
    estimates = (features(feature_map, q, "query") * features(feature_map, k, "key")).sum(-1)
    standard_error = estimates.std(0) / math.sqrt(NUM_DRAWS)
    expected = feature_map.kernel(q, k).diagonal()
    assert ((estimates.mean(0) - expected).abs() <= 4 * standard_error).all()


@pytest.mark.parametrize("name", ["FavorPlus", "Hyperbolic", "Trigonometric", "Oprf"])
def test_gaussian_lengths_give_the_softmax_kernel(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(3, length, D, dtype=torch.float64, generator=generator) for length in (4, 5))
    expected = torch.exp(q @ k.mT / math.sqrt(D))
    torch.testing.assert_close(RANDOM[name](D, 16).kernel(q, k), expected, rtol=1e-13, atol=0)


def test_fixed_lengths_lower_the_kernel_by_the_series() -> None:
    """SMREG/SM = exp(-w)·Σ w^k/k!·Π_{j<k} D/(D + 2j), w = s/2."""
    q = torch.tensor([[0.5, 1.0, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    w = 2 * q.square().sum().item()  # s = |2q|²
    term, total = 1.0, 0.0
    for k in range(60):
        total += term
        term *= w / (k + 1) * D / (D + 2 * k)
    ratio = FavorPlus(D, 8, lengths="fixed", scale=1.0).kernel(q, q).item() / math.exp(q.square().sum().item())
    assert ratio == pytest.approx(math.exp(-w) * total, rel=1e-13)


def test_relu_kernel_at_known_angles() -> None:
    q = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[3.0, 0.0], [0.0, 3.0], [-3.0, 0.0]], dtype=torch.float64)
    kernel = RandomRelu(2, 4, scale=1.0, floor=0.0).kernel(q, k)[0]
    torch.testing.assert_close(
        kernel, torch.tensor([3.0, 3 / math.pi, 0.0], dtype=torch.float64), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("other", [3.0, -3.0])
def test_relu_of_one_dimension_by_hand(other: float) -> None:
    """D = 1 with fixed lengths: w is 1 or -1, each half the time, so the mean is that of two numbers."""
    feature_map = RandomRelu(1, 4, draw="iid", lengths="fixed", scale=1.0, floor=0.5)
    q, k = torch.tensor([[2.0]]), torch.tensor([[other]])
    plus, minus = ((max(2 * w, 0) + 0.5) * (max(other * w, 0) + 0.5) for w in (1, -1))
    assert feature_map.kernel(q, k).item() == pytest.approx((plus + minus) / 2, rel=1e-13)


@pytest.mark.parametrize("other", [3.0, -3.0])
def test_relu_of_one_dimension_by_integration(other: float) -> None:
    """D = 1 with Gaussian lengths: the mean by quadrature over w."""
    feature_map = RandomRelu(1, 4, draw="iid", scale=1.0, floor=0.5)
    q, k = torch.tensor([[2.0]]), torch.tensor([[other]])

    def integrand(w: float) -> float:
        return (max(2 * w, 0) + 0.5) * (max(other * w, 0) + 0.5) * math.exp(-(w**2) / 2)

    integral = sum(scipy.integrate.quad(integrand, *side)[0] for side in ((-20, 0), (0, 20)))
    assert feature_map.kernel(q, k).item() == pytest.approx(integral / math.sqrt(2 * math.pi), rel=1e-9)


def test_relu_kernel_of_tiny_and_of_zero_vectors() -> None:
    """Homogeneous of degree 1 in each argument, however short; with a zero vector only the floor remains."""
    feature_map = RandomRelu(2, 4, scale=1.0, floor=0.0)
    q, k = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    assert feature_map.kernel(q * 1e-30, k).item() == pytest.approx(3 / math.pi * 1e-30, rel=1e-13)
    assert RandomRelu(2, 4, floor=0.5).kernel(q * 0, k * 0).item() == 0.25
