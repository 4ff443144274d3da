"""The kernels compute φ(q_i)·φ(k_j) averages and their gradients, to their dtype's rounding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import linattn
from grid import build, qkv, relative_error
from linattn.feature_maps import EluPlusOne, FavorPlus, FeatureMap

# Powers with one W, one per head, both signs, constants, weights of queries apart from those of keys; exponents that
# are no powers; features of both signs, with and without logarithmic weights.
POWERS = ("FavorPlus-per-head", "Hyperbolic", "Oprf", "LearnedExponential-per-head")
GIVEN = ("Sderf", "Centred-FavorPlus", "Taylor", "Trigonometric")
LEARNED = ("LearnedExponential", "Learned")
# Sums of roundings: so many times that of one number.
ROUNDINGS = 40


def gradients(
    feature_map: FeatureMap, tokens: Sequence[Tensor], backend: str, dtype: torch.dtype, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Outputs, log-normalisers, and the gradients of tokens, biases and parameters; some keys are masked."""
    leaves = [x.to(dtype).requires_grad_() for x in tokens]
    device = leaves[0].device
    kept = torch.promote_types(dtype, torch.float32)
    bias = torch.randn(1, 2, tokens[1].shape[2], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    bias = bias.to(device, kept).requires_grad_()
    mask = torch.ones(1, tokens[1].shape[2], dtype=torch.bool, device=device)
    mask[0, :2], mask[0, 9:12] = False, False
    out, log = linattn.linear_partial(
        *leaves, feature_map, key_mask=mask, key_bias=bias, is_causal=is_causal, enable_gqa=True, backend=backend
    )
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device) for x in (out, log)]
    # Rows that saw no key have the log-normaliser -inf; of signed maps it may be NaN.
    total = (out.double() * weights[0]).sum()
    if feature_map.positive_normalizer:
        total = total + torch.where(log.isfinite(), log.double() * weights[1], 0).sum()
    followed = [x for x in feature_map.parameters() if x.requires_grad]
    return (out, *torch.autograd.grad(total, (*leaves, bias, *followed)))


def check(map_name: str, dtype: torch.dtype, device: str, *, is_causal: bool, allowed: float) -> None:
    """Every result within so many roundings of the truth."""
    # Grouped heads for one of the maps: an interpreter takes its time.
    heads = 4 if map_name == "FavorPlus-per-head" else 2
    tokens = tuple(x.to(dtype).to(device) for x in qkv(1, heads, 2, 21, 21, value_dim=5))
    feature_map = build(map_name).to(device)
    truth = gradients(feature_map, tokens, "reference", torch.float64, is_causal=is_causal)
    found = gradients(feature_map, tokens, "triton", dtype, is_causal=is_causal)
    for index, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert relative_error(x, y) < allowed, f"item {index}"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", [*POWERS, *GIVEN, *LEARNED])
def test_float32(map_name: str, is_causal: bool, device: str) -> None:
    # A signed map's denominator is a difference, which costs it digits.
    lost = 1 if build(map_name).nonnegative else 100
    check(map_name, torch.float32, device, is_causal=is_causal, allowed=lost * ROUNDINGS * torch.finfo().eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", ["FavorPlus", "Sderf"])
def test_sixteen_bits(map_name: str, is_causal: bool, dtype: torch.dtype, device: str) -> None:
    """In an interpreter bfloat16 is rounded by its bits, and float16 is multiplied exactly."""
    # A result is rounded once, features, weights and sums once each: four halves of a last place, and as much again.
    check(map_name, dtype, device, is_causal=is_causal, allowed=4 * torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("map_name", "is_causal"),
    [("Centred-call-FavorPlus", False), ("Centred-Taylor", False), ("Centred-Taylor", True)],
)
def test_sixteen_bits_beside_wider_tokens(map_name: str, is_causal: bool, dtype: torch.dtype, device: str) -> None:
    """Gradients follow means of the call, or weights of queries: queries are in float32, and for means keys too."""
    check(map_name, dtype, device, is_causal=is_causal, allowed=4 * torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("fallen", [0, 1], ids=["queries", "keys"])
def test_faint_rows(fallen: int, is_causal: bool, dtype: torch.dtype, device: str) -> None:
    """Weights of e^-82 and less, whose inverse times a value would overflow."""
    query, key, value = qkv(1, 2, 2, 21, 21, value_dim=5)
    tokens = [-query.abs(), -key.abs(), 4096 * value]
    tokens[fallen] -= 82.0
    tokens = [x.to(dtype).to(device) for x in tokens]
    truth = gradients(EluPlusOne(8), tokens, "reference", torch.float64, is_causal=is_causal)
    found = gradients(EluPlusOne(8), tokens, "triton", dtype, is_causal=is_causal)
    # Exponents of 82 are rounded, and the logarithms of what becomes of them.
    allowed = ROUNDINGS * torch.finfo().eps + 4 * 82 * torch.finfo().eps
    for index, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert relative_error(x, y) < allowed + 4 * torch.finfo(dtype).eps / 2, f"item {index}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_wide_heads_are_loaded_for_every_tile(is_causal: bool, dtype: torch.dtype, device: str) -> None:
    """Two tiles of features, two blocks of tokens, and widths that fill no vector."""
    feature_map = FavorPlus(130, 24).to(device)
    wide = qkv(1, 2, 2, 21, 21, head_dim=130, value_dim=130, scale=0.25)
    tokens = tuple(x.to(dtype).to(device) for x in wide)
    truth = gradients(feature_map, tokens, "reference", torch.float64, is_causal=is_causal)
    found = gradients(feature_map, tokens, "triton", dtype, is_causal=is_causal)
    allowed = ROUNDINGS * torch.finfo().eps if dtype == torch.float32 else 4 * torch.finfo(dtype).eps / 2
    for index, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert relative_error(x, y) < allowed, f"item {index}"


SHAPES = {
    "fewer-queries": {"num_queries": 3, "num_keys": 20},
    "more-queries": {"num_queries": 20, "num_keys": 3},
    "one": {"num_queries": 1, "num_keys": 1},
    "no-keys": {"num_queries": 3, "num_keys": 0},
    "no-queries": {"num_queries": 0, "num_keys": 3},
    "wide": {"num_queries": 5, "num_keys": 5, "value_dim": 33},
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(shape: str, is_causal: bool, device: str, poisoned_memory) -> None:
    query, key, value = (x.to(device) for x in qkv(**{"batch": 1, "heads": 2, "kv_heads": 1, **SHAPES[shape]}))
    results = []
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        feature_map = build("FavorPlus").to(device)
        out = linattn.linear_attention(*leaves, feature_map, is_causal=is_causal, enable_gqa=True, backend=backend)
        results.append((out, *torch.autograd.grad((out * out).sum(), leaves)))
    for truth, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_strides_do_not_matter(device: str) -> None:
    tokens = [x.float().to(device) for x in qkv(1)]
    feature_map, results = build("FavorPlus").to(device), []
    for turned in (False, True):
        leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x for x in tokens]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = linattn.linear_attention(*leaves, feature_map, is_causal=True, enable_gqa=True, backend="triton")
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
