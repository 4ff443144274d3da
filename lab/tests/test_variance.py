"""Closed-form variances against sampled ones, and against published numbers.

Letters: D head width, N draws.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from linattn.feature_maps import FavorPlus, Hyperbolic, Oprf, RandomRelu, Sderf, Trigonometric, features
from linattn.feature_maps.random_base import RandomFeatureMap
from linattn_lab.variance import relative_variance, variance

D = 8
NUM_ROWS = 12  # one block and a half
NUM_DRAWS = 20_000


def two_for_each_row(kind: type[RandomFeatureMap]) -> int:
    return NUM_ROWS * kind.features_per_row


CASES = [
    *itertools.product([FavorPlus, Hyperbolic, Trigonometric, Oprf], ["orthogonal", "iid"], ["chi"]),
    *itertools.product([FavorPlus, Hyperbolic], ["orthogonal", "iid"], ["fixed"]),
]


@pytest.mark.parametrize(("kind", "draw", "lengths"), CASES)
def test_variance_over_draws(kind: type[RandomFeatureMap], draw: str, lengths: str) -> None:
    """Sample variance within 4 of its own standard errors, at |x + y|² = 0.5 and 1 (|x - y|² for cosines)."""
    own = {"mean_square": 1.0} if kind is Oprf else {"lengths": lengths}
    feature_map = kind(D, two_for_each_row(kind), draw=draw, scale=1.0, seed=7, num_heads=NUM_DRAWS, **own)
    generator = torch.Generator().manual_seed(5)
    u = torch.nn.functional.normalize(torch.randn(D, dtype=torch.float64, generator=generator), dim=0)
    apart = 0.3 * torch.randn(D, dtype=torch.float64, generator=generator)
    half = torch.stack([math.sqrt(s) / 2 * u for s in (0.5, 1.0)])
    q, k = half + apart, half - apart
    if kind is Trigonometric:
        k = -k
    estimates = (features(feature_map, q, "query") * features(feature_map, k, "key")).sum(-1)
    sampled, deviations = estimates.var(0), estimates - estimates.mean(0)
    standard_error = ((deviations**4).mean(0) - sampled**2).sqrt() / math.sqrt(NUM_DRAWS)
    assert (standard_error < 0.05 * sampled).all()  # sharp enough to tell orthogonal from independent rows
    expected = variance(feature_map, q, k).diagonal()
    assert ((sampled - expected).abs() <= 4 * standard_error).all()


@pytest.mark.parametrize(("kind", "lengths"), [case[::2] for case in CASES if case[1] == "iid"])
def test_both_variances_agree(kind: type[RandomFeatureMap], lengths: str) -> None:
    own = {"mean_square": 1.0} if kind is Oprf else {"lengths": lengths}
    feature_map = kind(D, two_for_each_row(kind), **own)
    generator = torch.Generator().manual_seed(6)
    q, k = (torch.randn(2, 3, D, dtype=torch.float64, generator=generator) for _ in range(2))
    sums = (q.unsqueeze(-2) + k.unsqueeze(-3)).square().sum(-1) * feature_map.scale
    differences = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) * feature_map.scale
    relative = relative_variance(feature_map, sums, differences)
    torch.testing.assert_close(
        variance(feature_map, q, k), relative * feature_map.kernel(q, k).square(), rtol=1e-9, atol=0
    )


# m times the relative variance at D = 64, orthogonal columns at m = 64; last, the kernel with lengths fixed to √D over
# the softmax kernel. Columns: s, d, cosines, positive and hyperbolic, each iid/orthogonal, then OPRF and the ratio.
REFERENCE = [
    (1, 0, 0, 0, 1.718, 1.256, 0.5431, 0.08102, 1.639, 0.9963),
    (0.5, 0.5, 0.1276, 0.006634, 0.6487, 0.5312, 0.1276, 0.01014, 0.6363, 0.9991),
    (0, 1, 0.5431, 0.0531, 0, 0, 0, 0, 0, 1),
    (4, 0, 0, 0, 53.60, 47.10, 26.31, 19.81, 35.39, 0.9452),
    (3, 1, 0.5431, 0.0531, 19.09, 15.25, 9.068, 5.233, 14.82, 0.9683),
    (2, 2, 2.762, 0.7634, 6.389, 4.610, 2.762, 0.9829, 5.609, 0.9855),
    (1, 3, 9.068, 4.514, 1.718, 1.256, 0.5431, 0.08102, 1.639, 0.9963),
    (0, 4, 26.31, 18.17, 0, 0, 0, 0, 0, 1),
    (4.5, 4.5, 44.01, 33.73, 89.02, 81.00, 44.01, 36.00, 53.46, 0.9318),
    (5, 5, 73.21, 60.54, 147.4, 137.8, 73.21, 63.57, 79.84, 0.9171),
    (16, 0, 0, 0, 8.886e6, 8.886e6, 4.443e6, 4.443e6, 1.105e5, 0.4706),
    (12, 4, 26.31, 18.17, 1.628e5, 1.627e5, 8.138e4, 8.134e4, 1.041e4, 0.6393),
    (8, 8, 1489, 1459, 2980, 2959, 1489, 1469, 743.2, 0.8098),
    (4, 12, 8.138e4, 8.132e4, 53.60, 47.10, 26.31, 19.81, 35.39, 0.9452),
    (24, 8, 1489, 1459, 2.649e10, 2.649e10, 1.324e10, 1.324e10, 6.816e6, 0.2143),
    (16, 16, 4.443e6, 4.443e6, 8.886e6, 8.886e6, 4.443e6, 4.443e6, 1.105e5, 0.4706),
    (18, 18, 3.283e7, 3.283e7, 6.566e7, 6.566e7, 3.283e7, 3.283e7, 3.311e5, 0.3946),
]


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: f"s={row[0]},d={row[1]}")
def test_reference_table(row: tuple[float, ...]) -> None:
    """Four printed digits: half a unit of the last is at most 5e-4 relative."""
    s, d, *columns, ratio = row
    sums, differences = (torch.tensor(x, dtype=torch.float64) for x in (s, d))
    found = [
        64 * relative_variance(kind(64, 64 * kind.features_per_row, draw=draw), sums, differences).item()
        for kind in (Trigonometric, FavorPlus, Hyperbolic)
        for draw in ("iid", "orthogonal")
    ]
    oprf = Oprf(64, 64, draw="iid", mean_square=s)
    found.append(64 * relative_variance(oprf, sums, differences).item())
    assert found == pytest.approx(columns, rel=5e-4, abs=1e-12)
    smaller = FavorPlus(64, 64, lengths="fixed", scale=1.0)
    q, k = torch.zeros(2, 1, 64, dtype=torch.float64)
    q[0, :2] = torch.tensor([math.sqrt(s), math.sqrt(d)]) / 2
    k[0, :2] = torch.tensor([math.sqrt(s), -math.sqrt(d)]) / 2
    assert smaller.kernel(q, k).item() / math.exp((s - d) / 4) == pytest.approx(ratio, rel=5e-4)


@pytest.mark.parametrize("feature_map", [RandomRelu(4, 8), Sderf(4, 8)])
def test_maps_whose_variance_is_no_function_of_lengths(feature_map: RandomFeatureMap) -> None:
    x = torch.ones(1, 4)
    with pytest.raises(
        ValueError, match=f"of {type(feature_map).__name__} depends on more .* estimate it over redraws"
    ):
        relative_variance(feature_map, x, x)


def test_an_oprf_without_a_tilt() -> None:
    with pytest.raises(ValueError, match=r"call fit\(query, key\)"):
        relative_variance(Oprf(4, 8), torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("s", [0.1, 1.0, 9.0])
def test_one_line_laws(s: float) -> None:
    """m·variance: exp(s) - 1, cosh(s) - 1, and cosh(d) - 1 for cosines."""
    square = torch.tensor(s, dtype=torch.float64)
    for kind, expected in (
        (FavorPlus, math.expm1(s)),
        (Hyperbolic, math.cosh(s) - 1),
        (Trigonometric, math.cosh(s) - 1),
    ):
        feature_map = kind(D, 10 * kind.features_per_row, draw="iid")
        assert 10 * relative_variance(feature_map, square, square).item() == pytest.approx(expected, rel=1e-12)


def test_oprf_tilt_minimises_the_variance_at_its_mean_square() -> None:
    at = torch.tensor(3.0, dtype=torch.float64)
    best = relative_variance(Oprf(D, 4, draw="iid", mean_square=3.0), at, at)
    for other in (2.9, 3.1):
        assert relative_variance(Oprf(D, 4, draw="iid", mean_square=other), at, at) > best
    assert best < relative_variance(FavorPlus(D, 4, draw="iid"), at, at)


@pytest.mark.parametrize("kind", [FavorPlus, Hyperbolic, Trigonometric])
@pytest.mark.parametrize("draw", ["orthogonal", "iid"])
def test_large_arguments_do_not_turn_into_nan(kind: type[RandomFeatureMap], draw: str) -> None:
    s = torch.tensor([300.0, 700.0, 1e4], dtype=torch.float64)
    found = relative_variance(kind(64, 64 * kind.features_per_row, draw=draw), s, s)
    # exp(s) or exp(s)/2 over m, and beyond the largest float64.
    assert found[0].item() == pytest.approx(math.exp(300) / (64 * kind.features_per_row), rel=1e-10)
    assert math.isfinite(found[1].item())
    assert found[2].item() == math.inf


@pytest.mark.parametrize("kind", [FavorPlus, Hyperbolic, Trigonometric])
def test_error_falls_as_the_square_root_of_the_features(kind: type[RandomFeatureMap]) -> None:
    """Root mean square error of the kernel against R: log-log slope -1/2 ± 0.1, with orthogonal blocks."""
    generator = torch.Generator().manual_seed(8)
    q, k = (0.5 * torch.randn(20, D, dtype=torch.float64, generator=generator) for _ in range(2))
    sizes, errors = [32, 128, 512], []
    for num_features in sizes:
        feature_map = kind(D, num_features, seed=num_features, num_heads=200)
        estimates = features(feature_map, q, "query") @ features(feature_map, k, "key").mT
        errors.append((estimates - feature_map.kernel(q, k)).square().mean().sqrt().item())
    slope = math.log(errors[-1] / errors[0]) / math.log(sizes[-1] / sizes[0])
    assert abs(slope + 0.5) <= 0.1
