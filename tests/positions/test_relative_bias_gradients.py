"""Gradients of relative biases, whose features are computed once more for them: of the same map, of the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grid import build, qkv, tokens
from linattn.feature_maps import FeatureMap
from linattn.positions import relative_bias_attention

LENGTH = 29


def step(feature_map: FeatureMap) -> None:
    """As of an optimiser."""
    with torch.no_grad():
        for parameter in feature_map.parameters():
            parameter.add_(0.5)


@pytest.mark.parametrize(
    ("map_name", "change"),
    [("FavorPlus", lambda x: x.redraw(5)), ("LearnedExponential", step), ("Oprf", lambda x: x.fit(*qkv()[:2]))],
    ids=["redraw", "step", "fit"],
)
def test_another_map_in_the_backward_pass_is_refused(map_name: str, change: Callable[[FeatureMap], object]) -> None:
    """Features are computed once more there."""
    feature_map, bias = build(map_name), torch.zeros(1, LENGTH, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in qkv(num_queries=LENGTH, num_keys=LENGTH))
    out = relative_bias_attention(q, k, v, feature_map, bias, is_causal=True, enable_gqa=True)
    change(feature_map)
    with pytest.raises(RuntimeError, match=r"redraw or fit after backward\(\), not before"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_written_over_after_the_call_moves_no_gradient(masked: bool, dtype: torch.dtype) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[:, 3] = not masked
    options = {"key_mask": mask if masked else None, "is_causal": True, "enable_gqa": True}
    found = []
    for is_written_over in (False, True):
        leaves = [x.requires_grad_() for x in qkv(num_queries=LENGTH, num_keys=LENGTH, dtype=dtype)]
        leaves.append(tokens(1, LENGTH).to(dtype).requires_grad_())
        q, k, v, bias = given = [1 * x for x in leaves]
        out = relative_bias_attention(q, k, v, build("FavorPlus"), bias, **options)
        if is_written_over:
            for x in given:
                x.detach().fill_(torch.nan)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("sizes", [(0, 2, 5, 3), (2, 2, 0, 3), (2, 2, 5, 0)], ids=["batch", "tokens", "values"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_of_nothing_there_is_nothing(sizes: tuple[int, ...], is_causal: bool) -> None:
    *outer, value_dim = sizes
    leaves = [torch.randn(*outer, width, requires_grad=True) for width in (8, 8, value_dim)]
    out = relative_bias_attention(*leaves, build("FavorPlus"), torch.zeros(1, 9), is_causal=is_causal)
    assert out.shape == sizes
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), leaves))
