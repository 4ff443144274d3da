"""Partial results over disjoint keys combine exactly, and rows are what the op averages with."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import (
    ADDITIVE_MAPS,
    CASES,
    CAUSAL_MAPS,
    SOFTMAX_MAPS,
    Case,
    build,
    qkv,
    takes_statistics_from_the_call,
)

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


def nested(query, key, value, feature_map, mask):
    """Parts combined twice."""
    part = linattn.linear_partial(query, key, value, feature_map, key_mask=mask)
    return linattn.combine(linattn.combine(part, part), linattn.softmax_partial(query, key, value, key_mask=mask))


def read(query, key, value, feature_map, mask):
    """A state beside exact keys."""
    state = linattn.State.empty(feature_map, batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
    part = state.absorb(feature_map, key, value, key_mask=mask).read(feature_map, query)
    return linattn.combine(linattn.combine(part, part), linattn.softmax_partial(query, key, value, key_mask=mask))


def windowed(is_causal):
    """A window inside a part."""

    def attend(query, key, value, feature_map, mask):
        options = {"key_mask": mask, "is_causal": is_causal, "window": 2}
        part = linattn.linear_partial(query, key, value, feature_map, **options)
        return linattn.combine(part, linattn.softmax_partial(query, key, value, key_mask=mask))

    return attend


# A signed normaliser has no logarithm.
POSITIVE_MAPS = [n for n in SOFTMAX_MAPS if n in CAUSAL_MAPS and build(n).positive_normalizer]
NESTED = {"nested": nested, "read": read, "window": windowed(False), "causal window": windowed(True)}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("map_name", POSITIVE_MAPS)
def test_rows_that_saw_nothing_have_no_gradient(map_name: str, kind: str) -> None:
    """However parts are nested: outputs 0, gradients 0 there, finite everywhere."""
    feature_map = build(map_name)
    leaves = [x.requires_grad_() for x in qkv(heads=2, num_queries=12, num_keys=12)]
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0], mask[1, :7] = False, False
    out = NESTED[kind](*leaves, feature_map, mask).out
    assert out.isfinite().all()
    assert (out[0] == 0).all()
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert grad.isfinite().all()
        assert (grad[0] == 0).all()


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


@pytest.mark.parametrize("hidden", ["later", "masked"])
@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_rows_do_not_depend_on_keys_they_do_not_see(map_name: str, hidden: str) -> None:
    """A giant key, later or masked: the rows before it are as without it, and average as the op does."""
    query, key, value = qkv()
    giant = key.clone()
    giant[:, :, 30] *= 100
    mask, compared = torch.ones(2, 37, dtype=torch.bool), 30
    if hidden == "masked":
        mask[:, 30], compared = False, 37
    options = {"key_mask": mask, "is_causal": hidden == "later", "enable_gqa": True}
    index = torch.arange(37)
    found = [linattn.attention_rows(query, k, build(map_name), index, **options) for k in (giant, key)]
    rows, usual = (x[:, :, :compared] for x in found)
    torch.testing.assert_close(rows, usual, rtol=1e-9, atol=1e-12)
    out = linattn.linear_attention(query, giant, value, build(map_name), **options)[:, :, :compared]
    torch.testing.assert_close(rows @ value.repeat_interleave(2, 1), out, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", [c for c in CASES if c.map_name in ("Expansion", "Expansion-2")], ids=str)
def test_cancellation_leaves_a_logarithm(case: Case) -> None:
    """Queries and keys too far from the centres for float32 to sum the series: no share of NaN beside exact keys."""
    feature_map = case.build(3)
    for seed in range(40):
        query, key, value = (x.float() for x in qkv(1, 2, 2, 9, 9, 3, seed=seed, scale=1.0))
        call = {"is_causal": case.is_causal, "backend": case.backend}
        part = linattn.linear_partial(85 * query, 400 * key, value, feature_map, **call)
        assert part.log_normalizer.isfinite().all()


def test_partials_of_a_length_that_a_graph_leaves_open() -> None:
    class Combined(torch.nn.Module):
        def forward(self, out: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
            return linattn.combine(linattn.Partial(out, log), linattn.Partial(2 * out, log + 1)).out

    def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1, 2, length, 4), torch.randn(1, 2, length)

    length = torch.export.Dim("length", min=2, max=99)
    program = torch.export.export(Combined(), inputs(7), dynamic_shapes=({2: length}, {2: length})).module()
    for given in (inputs(7), inputs(40)):
        torch.testing.assert_close(program(*given), Combined()(*given))
