"""First derivatives are those of the computed function: finite differences in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from differences import check_gradients
from grid import BACKENDS, CASES, CAUSAL_MAPS, HEAD_DIM, MAPS, Case, Learned, build, qkv, relative_error, sums
from linattn.feature_maps import FeatureMap, Hedgehog, LearnedExponential


@pytest.mark.parametrize("case", [c for c in CASES if c.backend == "blocked"], ids=str)
def test_gradcheck_of_tokens(case: Case, blocks_of) -> None:
    blocks_of(2)
    # Away from the kinks of relu and elu, where finite differences mean nothing.
    tokens = [(x + 0.05 * x.sign()).requires_grad_() for x in qkv(1, 2, 2, 4, 5, value_dim=2)]
    feature_map = case.build()
    assert torch.autograd.gradcheck(lambda q, k, v: case.attend(q, k, v, feature_map), tokens, fast_mode=True)


# Narrow, as every number is moved on its own.
NARROW = 3
LEARNED = {
    "Learned": (Learned(NARROW, 5, 2), {}),
    "LearnedExponential": (LearnedExponential(NARROW, 5), {}),
    "LearnedExponential-per-head": (LearnedExponential(NARROW, 3, num_heads=2), {}),
    "LearnedExponential-window": (LearnedExponential(NARROW, 3), {"window": 1}),
    "Hedgehog": (Hedgehog(NARROW), {}),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LEARNED)
def test_gradcheck_of_a_maps_own_parameters(name: str, backend: str, is_causal: bool, blocks_of) -> None:
    blocks_of(2)
    (feature_map, options), case = LEARNED[name], Case(name, backend, is_causal)
    # A window pairs the positions of queries and keys.
    q, k, v = qkv(1, 4, 2, 5 if options else 4, 5, NARROW, value_dim=1)
    names = [name for name, _ in feature_map.named_parameters()]

    def attend(*parameters: torch.Tensor) -> torch.Tensor:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.map = feature_map

            def forward(self) -> torch.Tensor:
                return case.attend(q, k, v, self.map, **options)

        swapped = {f"map.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}
        return torch.func.functional_call(Model(), swapped, ())

    inputs = tuple(parameter.detach().double().clone().requires_grad_() for parameter in feature_map.parameters())
    assert torch.autograd.gradcheck(attend, inputs)


class Uniform(FeatureMap):
    """φ(x) = 1, whatever x: attention that averages the values, as a baseline."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, num_features=1)

    def query(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[..., :1])

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q.double()) @ self.query(k.double()).mT


@pytest.mark.parametrize("is_causal", [False, True])
def test_features_that_no_token_reaches_have_gradient_0(is_causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(heads=2))
    out = linattn.linear_attention(q, k, v, Uniform(HEAD_DIM), is_causal=is_causal)
    of_query, of_key, of_value = torch.autograd.grad(out[:, :, -1].sum(), (q, k, v))
    assert not of_query.any()
    assert not of_key.any()
    torch.testing.assert_close(of_value, torch.full_like(v, 1 / v.shape[2]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("map_name", ["FavorPlus", "EluPlusOne", "Trigonometric", "Centred-Taylor"])
def test_gradcheck_through_the_state(map_name: str, blocks_of) -> None:
    """Into the incoming state's sums, and out through the outgoing state."""
    blocks_of(2)
    feature_map = Case(map_name, "blocked", True).build(NARROW)
    before = linattn.linear_attention_with_state(*qkv(1, 2, 2, 3, 3, NARROW, value_dim=2, seed=9), feature_map).state

    def attend(q, k, v, S, z):
        state = linattn.State(S, z, before.m.expand(len(S), -1, -1), before.built_with)
        out, after = linattn.linear_attention_with_state(q, k, v, feature_map, state)
        # The sums are relative to m, a constant for gradients: only their product is a function of the tokens.
        return out, sums(after) * torch.exp(after.m).unsqueeze(-1), after.read(feature_map, q).out

    check_gradients(attend, (*qkv(1, 2, 2, 3, 3, NARROW, value_dim=2), before.S, before.z))


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck_of_the_log_normaliser(backend: str, is_causal: bool, blocks_of) -> None:
    blocks_of(2)
    for map_name in ("FavorPlus", "EluPlusOne", "Centred-Taylor"):
        feature_map = Case(map_name, backend, is_causal).build()
        inputs = [(x + 0.05 * x.sign()).requires_grad_() for x in qkv(1, 2, 2, 4, 4, value_dim=2)]

        def attend(q, k, v, feature_map=feature_map):
            return tuple(linattn.linear_partial(q, k, v, feature_map, is_causal=is_causal, backend=backend))

        assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


def test_no_state_is_unwound_by_subtraction() -> None:
    """One key 1e8 times heavier than the rest: gradients of the small ones keep their digits."""
    case = Case("EluPlusOne", "blocked", True)
    q, k, v = qkv(1, 1, 1, 256, 256)
    k[:, :, 200] *= 1e8
    errors = {}
    for name, backend, dtype in (
        ("truth", "reference", torch.float64),
        ("reference", "reference", torch.float32),
        ("found", "blocked", torch.float32),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = Case(case.map_name, backend, True).attend(*leaves, case.build())
        errors[name] = torch.autograd.grad(out[:, :, :200].square().sum(), leaves)
    for truth, reference, found in zip(errors["truth"], errors["reference"], errors["found"], strict=True):
        early = (slice(None), slice(None), slice(0, 200))
        assert relative_error(found[early], truth[early]) <= 3 * relative_error(reference[early], truth[early]) + 6e-8


@pytest.mark.parametrize("is_causal", [False, True])
def test_denormal_normalisers_pass_no_nan_on(is_causal: bool) -> None:
    """Features of e^-46 on both sides, whose products' inverse is beyond the dtype, beside ordinary rows."""
    query, key, value = (x.float() for x in qkv(1, 1, 1, 6, 6, 4))
    query[:, :, 2:4] = key[:, :, :4] = -46.0
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = linattn.linear_attention(*leaves, linattn.feature_maps.EluPlusOne(4), is_causal=is_causal)
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0


def test_second_derivatives_are_refused_by_blocked() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 3, 3, value_dim=2))
    feature_map = Case("FavorPlus", "blocked", False).build()
    first = torch.autograd.grad(linattn.linear_attention(q, k, v, feature_map).sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="backend='reference' for second derivatives"):
        first.sum().backward()


# Statistics of a call are constants for gradients, and not for differences; features of rectifiers have no second ones.
@pytest.mark.parametrize("name", [name for name in MAPS if name != "Expansion-call"])
def test_second_derivatives_are_right_in_the_reference_and_in_rows(name: str) -> None:
    feature_map, tokens = build(name).requires_grad_(False), qkv(1, 2, 2, 3, 3, value_dim=2)
    rows = torch.tensor([0, 2])
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: (
            linattn.linear_attention(q, k, v, feature_map, backend="reference"),
            *linattn.linear_partial(q, k, v, feature_map, backend="reference", is_causal=name in CAUSAL_MAPS),
            linattn.attention_rows(q, k, feature_map, rows),
        ),
        tuple(x.requires_grad_() for x in tokens),
        fast_mode=True,
    )


def test_second_derivatives_by_torch_func_are_right_in_the_reference() -> None:
    feature_map, (query, key, value) = build("EluPlusOne"), qkv(1, 2, 2, 3, 3, value_dim=2)

    def loss(query: Tensor) -> Tensor:
        return linattn.linear_attention(query, key, value, feature_map, backend="reference").square().sum()

    found = torch.func.hessian(loss)(query)
    torch.testing.assert_close(found, torch.func.jacrev(torch.func.grad(loss))(query), rtol=1e-10, atol=1e-10)
    step = 1e-5 * torch.ones_like(query)
    difference = (torch.func.grad(loss)(query + step) - torch.func.grad(loss)(query - step)) / 2e-5
    torch.testing.assert_close(found.sum((-4, -3, -2, -1)), difference, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["FavorPlus", "Hyperbolic", "Sderf", "LearnedExponential", "Expansion"])
def test_second_derivatives_at_tokens_of_zeros_are_right_in_the_reference(name: str) -> None:
    """Zero padding that is not masked, or projections that begin at 0."""
    feature_map, (query, key, value) = build(name), qkv(1, 2, 2, 3, 3, value_dim=2)
    key[:, :, 0] = query[:, :, 1] = 0

    def loss(key: Tensor) -> Tensor:
        return linattn.linear_attention(query, key, value, feature_map, backend="reference").sin().sum()

    found, slope = torch.func.hessian(loss)(key), torch.func.grad(loss)
    step = 1e-5 * torch.ones_like(key)
    difference = (slope(key + step) - slope(key - step)) / 2e-5
    torch.testing.assert_close(found.sum((-4, -3, -2, -1)), difference, rtol=1e-6, atol=1e-8)
    (first,) = torch.autograd.grad(loss(key.requires_grad_()), key, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), key)
    torch.testing.assert_close(second, difference, rtol=1e-6, atol=1e-8)


def test_second_derivatives_of_faint_rows_are_refused_in_the_reference() -> None:
    query, key, value = (x.float() for x in qkv(1, 1, 1, 6, 6, 4))
    leaves = [x.requires_grad_() for x in (query - 46, key - 46, value)]
    feature_map = linattn.feature_maps.EluPlusOne(4)
    for out in (
        linattn.linear_attention(*leaves, feature_map, backend="reference"),
        linattn.attention_rows(*leaves[:2], feature_map, torch.tensor([1])),
    ):
        torch.autograd.grad(out.sum(), leaves[:2], retain_graph=True)
        with pytest.raises(NotImplementedError, match="so faint have first derivatives only, without create_graph"):
            torch.autograd.grad(out.sum(), leaves[:2], create_graph=True)
