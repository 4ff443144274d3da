"""Partial results over disjoint keys combine exactly, and rows are what the op averages with."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import ADDITIVE_MAPS, CASES, SOFTMAX_MAPS, Case, build, qkv, takes_statistics_from_the_call

PARTIAL_CASES = tuple(
    c for c in CASES if c.map_name in ADDITIVE_MAPS and not takes_statistics_from_the_call(c.map_name)
)


@pytest.mark.parametrize("case", PARTIAL_CASES, ids=str)
def test_parts_combine_into_the_whole(case: Case) -> None:
    query, key, value = qkv(num_queries=6, scale=2.0)
    options = {"enable_gqa": True, "backend": case.backend}
    whole = linattn.linear_partial(query, key, value, case.build(), **options)
    cuts = ((0, 0), (0, 5), (5, 6), (6, 37))
    parts = [linattn.linear_partial(query, key[:, :, a:b], value[:, :, a:b], case.build(), **options) for a, b in cuts]
    found = linattn.combine(*parts)
    torch.testing.assert_close(found.out, whole.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_normalizer, whole.log_normalizer, rtol=1e-12, atol=1e-12)
    nested = linattn.combine(linattn.combine(*parts[:2]), linattn.combine(*parts[2:]))
    torch.testing.assert_close(nested.out, whole.out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", PARTIAL_CASES, ids=str)
def test_the_log_normaliser_is_that_of_the_map(case: Case) -> None:
    """On the kernel's true scale: log Σ_j φ(q)·φ(k_j), features formed outright."""
    query, key, value = qkv(heads=2)
    found = linattn.linear_partial(
        query, key, value, case.build(), is_causal=case.is_causal, backend=case.backend
    ).log_normalizer
    phi_q, phi_k = (
        linattn.feature_maps.features(case.build(), x, side) for x, side in ((query, "query"), (key, "key"))
    )
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if case.is_causal else weights
    torch.testing.assert_close(found, weights.sum(-1).log(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "name", [n for n in SOFTMAX_MAPS if n in ADDITIVE_MAPS and not takes_statistics_from_the_call(n)]
)
def test_exact_keys_and_kernel_keys_share_one_normaliser(name: str) -> None:
    query, key, value = qkv(heads=2)
    feature_map = build(name)
    exact = linattn.softmax_partial(query, key[:, :, :10], value[:, :, :10])
    rest = linattn.linear_partial(query, key[:, :, 10:], value[:, :, 10:], feature_map)
    phi_q, phi_k = (linattn.feature_maps.features(feature_map, x, s) for x, s in ((query, "query"), (key, "key")))
    weights = phi_q @ phi_k.mT
    weights[..., :10] = torch.exp(query @ key[:, :, :10].mT * 8**-0.5)
    expected = weights @ value / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(linattn.combine(exact, rest).out, expected, rtol=1e-11, atol=1e-11)


def test_softmax_parts_combine_into_softmax() -> None:
    query, key, value = qkv()
    parts = [
        linattn.softmax_partial(query, key[:, :, a:b], value[:, :, a:b], enable_gqa=True) for a, b in ((0, 9), (9, 37))
    ]
    whole = linattn.softmax_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(linattn.combine(*parts).out, whole, rtol=1e-12, atol=1e-12)


def test_combine_differentiates_rows_that_saw_nothing() -> None:
    query, key, value = (x.requires_grad_() for x in qkv(heads=2))
    mask = torch.zeros(2, 37, dtype=torch.bool)
    mask[0, :4] = True
    parts = (
        linattn.linear_partial(query, key, value, build("FavorPlus"), key_mask=mask),
        linattn.softmax_partial(query, key, value, key_mask=mask.roll(4, 1)),
    )
    out = linattn.combine(*parts).out
    assert (out[1] == 0).all()
    for grad in torch.autograd.grad(out.sum(), (query, key, value)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("case", [c for c in CASES if c.backend == "blocked"], ids=str)
def test_rows_are_what_the_op_averages_with(case: Case) -> None:
    query, key, value = qkv()
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, 3:6] = False
    index = torch.tensor([0, 36, 17, -2])
    rows = linattn.attention_rows(
        query, key, case.build(), index, key_mask=mask, is_causal=case.is_causal, enable_gqa=True
    )
    assert rows.shape == (2, 4, 4, 37)
    assert (rows[0, ..., 3:6] == 0).all()
    expected = case.attend(query, key, value, case.build(), key_mask=mask)[:, :, index]
    found = rows @ value.repeat_interleave(2, 1)
    tolerance = 1e-11 if case.map_name in ADDITIVE_MAPS else 1e-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_rows_survive_a_later_giant_key() -> None:
    query, key, _ = qkv(heads=2, dtype=torch.float32)
    key[:, :, 30] *= 100
    rows = linattn.attention_rows(query, key, build("FavorPlus"), torch.arange(30), is_causal=True)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 2, 30), rtol=1e-5, atol=0)
