"""Every backend computes φ(q_i)·φ(k_j) averages, to its dtype's rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import linattn
from grid import BACKENDS, CASES, MAPS, Case, cases_in_turns, qkv, relative_error
from linattn.feature_maps import Expansion

SHAPES = {
    "square": {"num_queries": 37, "num_keys": 37},
    "fewer-queries": {"num_queries": 5, "num_keys": 37},
    "more-queries": {"num_queries": 37, "num_keys": 5},
    "one": {"num_queries": 1, "num_keys": 1},
    "no-keys": {"num_queries": 3, "num_keys": 0},
    "no-queries": {"num_queries": 0, "num_keys": 3},
    "one-head": {"heads": 2, "kv_heads": 2, "batch": 1},
}


def by_hand(case: Case, feature_map, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The quadratic formula in six lines, from the map's own features; float64, moderate inputs only."""
    groups = query.shape[1] // key.shape[1]
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    visible = visible.tril(key.shape[2] - query.shape[2]) if case.is_causal else visible
    visible = visible if mask is None else visible & mask[:, None, None, :]
    own = feature_map.call_tensors(query, key, key_mask=mask, is_causal=case.is_causal)
    for name, tensor in own.items():
        setattr(feature_map, name, tensor)
    if isinstance(feature_map, Expansion):
        wide = (x.repeat_interleave(groups, 1) for x in (key, value))
        return expansion(feature_map, query, *wide, visible)
    phi_q = torch.stack(
        [linattn.feature_maps.features(feature_map, query[:, g::groups], "query") for g in range(groups)],
        dim=2,
    )
    phi_k = linattn.feature_maps.features(feature_map, key, "key")
    weights = phi_q @ phi_k.mT.unsqueeze(2)
    weights = weights * (visible if mask is None else visible.unsqueeze(1))
    total = weights.sum(-1, keepdim=True)
    rows = weights / torch.where(total == 0, 1, total)
    return (rows @ value.unsqueeze(2)).flatten(1, 2)


def expansion(feature_map: Expansion, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Its definition: weights p_j·(1 + t_j + t_j²/2), p ∝ exp(scale·c·k_j) over visible keys, t of mean 0."""
    groups, scale = query.shape[1] // feature_map.centres.shape[-3], feature_map.scale
    centres, probes = (x.repeat_interleave(groups, -3) for x in (feature_map.centres, feature_map.probes))
    # |x - c|² in the metric of probes = metric·centres, without what all centres share.
    nearest = ((centres * probes).sum(-1).unsqueeze(-2) - 2 * query @ probes.mT).argmin(-1)
    centre = torch.take_along_dim(centres.expand(*query.shape[:2], -1, -1), nearest.unsqueeze(-1), -2)
    logits = torch.where(visible, scale * centre @ key.mT, -torch.inf)
    p = torch.nan_to_num(torch.softmax(logits, -1))
    step = scale * (query - centre)
    if feature_map.order == 1:
        # Steps of more than 1.5 standard deviations of the logits are shortened.
        spread = feature_map.spread.repeat_interleave(groups, -3)
        step = step * (1.5 / (step.norm(dim=-1, keepdim=True) * spread)).clamp(max=1)
    products = step @ key.mT
    t = products - (p * products).sum(-1, keepdim=True)
    weights = p * (1 + t * (feature_map.order > 0) + t**2 / 2 * (feature_map.order > 1))
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total) @ value


def conditioning(case: Case, query: Tensor, key: Tensor) -> float:
    """How far signed weights cancel: the largest Σ_j |a_ij|; 1 for nonnegative maps."""
    feature_map = case.build()
    if feature_map.nonnegative or query.shape[2] == 0 or key.shape[2] == 0:
        return 1.0
    rows = linattn.attention_rows(
        query, key, feature_map, torch.arange(query.shape[2]), is_causal=case.is_causal, enable_gqa=True
    )
    return max(float(rows.detach().abs().sum(-1).max()), 1.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.backend == BACKENDS[0]], ids=str)
def test_float64_equals_the_formula(case: Case, shape: str, blocks_of) -> None:
    """In every backend: the formula is computed once for all of them."""
    blocks_of(16)
    query, key, value = qkv(**SHAPES[shape])
    bound = 1e-12 * conditioning(case, query, key) ** 2
    for mask in (None, torch.rand(key.shape[0], key.shape[2], generator=torch.Generator().manual_seed(5)) < 0.7):
        truth = by_hand(case, case.build(), query, key, value, mask)
        for backend in BACKENDS:
            one = dataclasses.replace(case, backend=backend)
            found = one.attend(query, key, value, one.build(), key_mask=mask)
            assert found.shape == truth.shape
            torch.testing.assert_close(found, truth, rtol=bound, atol=bound)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_gradients_equal_those_of_the_quadratic_form(case: Case, blocks_of) -> None:
    """Over thirteen blocks, hence five segments of the causal backward pass."""
    blocks_of(3)
    results = []
    for backend in ("reference", case.backend):
        leaves = [x.requires_grad_() for x in qkv()]
        mask = torch.ones(2, 37, dtype=torch.bool)
        mask[0, :3], mask[1, 20:25] = False, False
        out = Case(case.map_name, backend, case.is_causal).attend(*leaves, case.build(), key_mask=mask)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        results.append(torch.autograd.grad((out * weights).sum(), leaves))
    bound = 1e-12 * conditioning(case, *qkv()[:2]) ** 3
    for truth, found in zip(*results, strict=True):
        assert relative_error(found, truth) < bound


@pytest.mark.parametrize(
    ("case", "dtype"),
    cases_in_turns(MAPS, [torch.float32, torch.bfloat16, torch.float16], ["blocked"]),
    ids=str,
)
def test_low_precision_error_is_at_most_twice_the_references(case: Case, dtype: torch.dtype) -> None:
    """Gradients at most three times the worst of its own; both plus the band of rounding a result, half a unit."""
    query, key, value = qkv(batch=1, num_queries=150, num_keys=150, dtype=dtype)
    results = {}
    for name, backend, kept in (
        ("truth", "reference", torch.float64),
        ("reference", "reference", dtype),
        ("found", case.backend, dtype),
    ):
        leaves = [x.to(kept).requires_grad_() for x in (query, key, value)]
        out = Case(case.map_name, backend, case.is_causal).attend(*leaves, case.build())
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results[name] = (out, *torch.autograd.grad((out * weights.to(dtype).to(kept)).sum(), leaves))
    band = torch.finfo(dtype).eps / 2 * conditioning(case, query.double(), key.double()) ** 2
    errors = {
        name: [relative_error(x, truth) for x, truth in zip(results[name], results["truth"], strict=True)]
        for name in ("reference", "found")
    }
    (of_out, *of_leaves), (found, *gradients) = errors["reference"], errors["found"]
    assert found <= 2 * of_out + band
    # All of them go through the same features, and which product rounds one luckily depends on the processor.
    assert max(gradients) <= 3 * max(of_leaves) + band


@pytest.mark.parametrize("is_causal", [False, True])
def test_strides_do_not_matter(is_causal: bool) -> None:
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    case = Case("FavorPlus", "blocked", is_causal)
    expected = case.attend(*(x.contiguous() for x in (query, key, value)), case.build())
    found = case.attend(query, key, value, case.build())
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_rows_whose_weights_cancel_are_those_of_attention(backend: str) -> None:
    """q·k_1 = -q·k_2, exactly: the normaliser is 0, and so is the output."""
    query, key, value = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [1.0, -1.0], [3.0, 5.0]))
    identity = linattn.feature_maps.Identity(1)
    rows = linattn.attention_rows(query, key, identity, torch.tensor([0]))
    assert torch.equal(rows @ value, linattn.linear_attention(query, key, value, identity, backend=backend))
