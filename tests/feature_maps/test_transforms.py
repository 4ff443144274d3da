"""Maps under autograd, torch.func and torch.compile.

Letters: B batch, H heads, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linattn import linear_attention
from linattn.feature_maps import (
    FEATURE_MAPS,
    Balanced,
    Centred,
    FavorPlus,
    FeatureMap,
    GroupedFeatureMap,
    Sderf,
    Taylor,
)

D = 6
Build = Callable[..., FeatureMap]


def outputs(feature_map: FeatureMap, x: Tensor) -> tuple[Tensor, ...]:
    """All a map says of queries and keys."""
    found = (feature_map.query(x), feature_map.key(x), feature_map.query_log_weight(x), feature_map.key_log_weight(x))
    return tuple(t for t in found if t is not None)


def inputs(*shape: int) -> Tensor:
    x = torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x + 0.05 * x.sign()  # away from kinks


def centred(inner: FeatureMap) -> Centred:
    mean = torch.full((1, D), 0.1, dtype=torch.float64)
    return Centred(inner, query_mean=mean, key_mean=-mean)


def balanced(inner: FeatureMap) -> Balanced:
    transform = torch.eye(D) + 0.2 * torch.randn(D, D, generator=torch.Generator().manual_seed(1))
    return Balanced(inner, transform=transform)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_gradients(build: Build, name: str) -> None:
    feature_map = build(name)
    maps = [feature_map]
    if feature_map.softmax_kernel and not isinstance(feature_map, GroupedFeatureMap):
        maps += [centred(feature_map), centred(balanced(feature_map))]
    for each in maps:
        assert torch.autograd.gradcheck(lambda x, m=each: outputs(m, x), inputs(3).requires_grad_())


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_inputs_are_never_written(build: Build, name: str) -> None:
    feature_map, x = build(name), inputs(2, 3)
    before = x.clone()
    outputs(feature_map, x)
    feature_map.kernel(x, x)
    assert torch.equal(x, before)


class Itself(FeatureMap):
    """φ(x) = exp(x), whose exponents are the input itself."""

    exponential = True

    def query(self, x: Tensor) -> Tensor:
        return x

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        return x

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return q.double().exp() @ k.double().exp().mT


@pytest.mark.parametrize("is_causal", [False, True])
def test_exponents_that_are_the_input_are_not_written_over(is_causal: bool) -> None:
    given = [torch.randn(1, 2, 40, 3, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    before = [x.clone() for x in given]
    out = linear_attention(*given, Itself(3, 3), is_causal=is_causal)
    assert all(map(torch.equal, given, before))
    wanted = linear_attention(*given, Itself(3, 3), is_causal=is_causal, backend="reference")
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_vmap_equals_a_batch(build: Build, name: str) -> None:
    feature_map, x = build(name), inputs(4, 2, 3)
    for mapped, expected in zip(
        torch.func.vmap(lambda x: outputs(feature_map, x))(x), outputs(feature_map, x), strict=True
    ):
        torch.testing.assert_close(mapped, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ["FavorPlus", "Hyperbolic", "Trigonometric", "Oprf", "Sderf", "RandomRelu"])
def test_one_draw_per_head(build: Build, name: str) -> None:
    feature_map, x = build(name, num_heads=2), inputs(3, 2, 5)
    alone = build(name)
    for head in range(2):
        alone.load_state_dict({**feature_map.state_dict(), "projection": feature_map.projection[head]})
        torch.testing.assert_close(feature_map.query(x)[:, head], alone.query(x[:, head]), rtol=1e-13, atol=1e-13)


def test_a_projection_swapped_from_outside_is_used_and_differentiated() -> None:
    feature_map, other, x = FavorPlus(D, 8), FavorPlus(D, 8, seed=1), inputs(3)
    host = torch.nn.Module()
    host.map = feature_map
    host.forward = lambda x: host.map.query(x)
    weight = other.projection.clone().requires_grad_()
    found = torch.func.functional_call(host, {"map.projection": weight}, (x,))
    torch.testing.assert_close(found, other.query(x), rtol=1e-14, atol=1e-14)
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.any()


@pytest.mark.parametrize(
    "feature_map",
    [
        FavorPlus(D, 8),
        Taylor(D),
        centred(FavorPlus(D, 8, num_heads=2)),
        centred(balanced(FavorPlus(D, 8))),
        Sderf(D, 8, second_moment=torch.eye(D)),
    ],
    ids=["FavorPlus", "Taylor", "Centred", "Balanced", "Sderf"],
)
def test_compiles_whole(feature_map: FeatureMap) -> None:
    torch.compiler.reset()
    x = inputs(2, 3)
    compiled = torch.compile(lambda x: outputs(feature_map, x), fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(x), outputs(feature_map, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
