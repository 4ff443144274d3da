"""Centring keeps the kernel, lowers the variance, and takes its means from where it may.

Letters: B batch, H heads, Hkv key/value heads, L tokens, D head width.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linattn.feature_maps import Centred, FavorPlus, FeatureMap, Hyperbolic, Oprf, Taylor, Trigonometric, features

D = 6


def normal(*shape: int, seed: int = 0, mean: float = 0.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + mean


def means() -> dict[str, Tensor]:
    return {"query_mean": normal(1, D, seed=1), "key_mean": normal(1, D, seed=2)}


@pytest.mark.parametrize("inner", [FavorPlus(D, 8), Hyperbolic(D, 8), Trigonometric(D, 8), Oprf(D, 8, mean_square=1.0)])
def test_the_softmax_kernel_is_unchanged(inner: FeatureMap) -> None:
    q, k = normal(2, 4, D), normal(2, 5, D, seed=3)
    kernel = Centred(inner, **means()).kernel(q, k)
    torch.testing.assert_close(kernel, torch.exp(q @ k.mT / math.sqrt(D)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [1, 2])
def test_centred_taylor_equals_its_formula(order: int) -> None:
    q, k = normal(4, D), normal(5, D, seed=3)
    centred = Centred(Taylor(D, order=order, scale=0.5), **means())
    query_mean, key_mean = means().values()
    t = 0.5 * (q - query_mean) @ (k - key_mean).mT
    polynomial = 1 + t if order == 1 else 1 + t + t**2 / 2
    expected = polynomial * torch.exp(0.5 * (q @ k.mT) - t)
    products = features(centred, q, "query") @ features(centred, k, "key").mT
    torch.testing.assert_close(products, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(centred.kernel(q, k), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [FavorPlus, Hyperbolic, Trigonometric])
def test_features_are_the_inner_ones_times_both_weights(kind: type[FeatureMap]) -> None:
    q, k, inner = normal(4, D), normal(5, D, seed=3), kind(D, 8)
    centred = Centred(inner, **means())
    assert (centred.exponential, centred.nonnegative) == (inner.exponential, inner.nonnegative)
    query_mean, key_mean = means().values()
    estimate = features(inner, q - query_mean, "query") @ features(inner, k - key_mean, "key").mT
    weights = torch.exp(((q - query_mean) @ key_mean.mT + (k @ query_mean.mT).mT) / math.sqrt(D))
    products = features(centred, q, "query") @ features(centred, k, "key").mT
    torch.testing.assert_close(products, estimate * weights, rtol=1e-11, atol=1e-12)


def test_variance_falls_when_the_means_are_removed() -> None:
    """Unbiased before and after, and the spread over 2,000 draws much lower."""
    q, k = 0.3 * normal(1, 1, 20, D) + 1, 0.3 * normal(1, 1, 20, D, seed=3) + 1
    plain = FavorPlus(D, 16, num_heads=2000)
    centred = Centred(plain).fit(q, k)
    truth = torch.exp((q * k).sum(-1) / math.sqrt(D))[0]
    spread = []
    for feature_map in (plain, centred):
        ratio = (features(feature_map, q[0], "query") * features(feature_map, k[0], "key")).sum(-1) / truth
        standard_error = ratio.std(0) / math.sqrt(2000)
        assert ((ratio.mean(0) - 1).abs() <= 4 * standard_error).all()
        spread.append(ratio.std(0).mean().item())
    assert spread[1] < spread[0] / 3


def test_fit_takes_one_mean_per_key_head() -> None:
    query, key = normal(2, 6, 5, D), normal(2, 3, 7, D, seed=3)
    centred = Centred(Oprf(D, 8)).fit(query, key)
    assert centred.query_mean is not None
    assert centred.key_mean is not None
    for head in range(3):
        torch.testing.assert_close(centred.query_mean[head, 0], query[:, 2 * head : 2 * head + 2].mean((0, 1, 2)))
        torch.testing.assert_close(centred.key_mean[head, 0], key[:, head].mean((0, 1)))


def test_fit_measures_what_is_left_for_an_oprf() -> None:
    query, key = normal(2, 6, 5, D), normal(2, 3, 7, D, seed=3)
    centred = Centred(Oprf(D, 8)).fit(query, key)
    total = 0.0
    for head in range(6):
        q = query[:, head] - centred.query_mean[head // 2]
        k = key[:, head // 2] - centred.key_mean[head // 2]
        total += (q.unsqueeze(-2) + k.unsqueeze(-3)).square().sum(-1).mean().item() / 6
    assert centred.inner.mean_square.item() == pytest.approx(total / math.sqrt(D), rel=1e-12)


def call(query: Tensor, key: Tensor, key_mask: Tensor | None = None) -> dict[str, Tensor]:
    """The means of one call: (B, Hkv, 1, D)."""
    return dict(Centred(Taylor(D)).call_tensors(query, key, key_mask=key_mask, is_causal=False))


def test_the_call_brings_its_own_means() -> None:
    query, key = normal(2, 3, 10, D), normal(2, 3, 7, D, seed=3)
    found = call(query, key)
    torch.testing.assert_close(found["query_mean"], query.mean(-2, keepdim=True))
    torch.testing.assert_close(found["key_mean"], key.mean(-2, keepdim=True))
    host = torch.nn.Module()
    host.map = Centred(Taylor(D))
    host.forward = lambda q, k: features(host.map, q, "query") @ features(host.map, k, "key").mT
    swapped = {f"map.{name}": mean for name, mean in found.items()}
    products = torch.func.functional_call(host, swapped, (query, key))
    fixed = Centred(Taylor(D), query_mean=found["query_mean"][1, 2], key_mean=found["key_mean"][1, 2])
    torch.testing.assert_close(products[1, 2], fixed.kernel(query[1, 2], key[1, 2]), rtol=1e-11, atol=1e-12)
    assert host.map.query_mean is None


def test_gradients_flow_through_the_means_of_the_call() -> None:
    def output(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(query, key).values())

    query, key = normal(1, 2, 4, D).requires_grad_(), normal(1, 2, 3, D, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(output, (query, key))


@pytest.mark.parametrize("junk", [1e4, math.inf, math.nan])
def test_masked_positions_are_inert(junk: float) -> None:
    """Two query heads for each key head, as long as the keys: padding leaves both sides, forward and backward."""
    keep = torch.tensor([[True, True, False, True], [False, True, True, False]])
    key = normal(2, 3, 4, D)
    query = normal(2, 6, 4, D, seed=3)
    expected = call(query, key, keep)
    for head in range(3):
        torch.testing.assert_close(expected["key_mean"][1, head, 0], key[1, head, 1:3].mean(0))
        group = query[1, 2 * head : 2 * head + 2, 1:3]
        torch.testing.assert_close(expected["query_mean"][1, head, 0], group.mean((0, 1)))
    for x in (key, query):
        x[~keep[:, None].expand(x.shape[:3])] = junk
        x.requires_grad_()
    found = call(query, key, keep)
    for name, mean in found.items():
        assert torch.equal(mean, expected[name])
    sum(mean.sum() for mean in found.values()).backward()
    for x in (key, query):
        assert x.grad is not None
        assert (x.grad[~keep[:, None].expand(x.shape[:3])] == 0).all()
        assert x.grad.isfinite().all()


def test_queries_of_another_length_are_not_masked() -> None:
    """Cross-attention: the mask speaks of keys alone, even where a group has as many queries in all."""
    query, key = normal(1, 2, 2, D, seed=3), normal(1, 1, 4, D)
    found = call(query, key, torch.tensor([[True, False, True, True]]))
    torch.testing.assert_close(found["query_mean"][0, 0, 0], query.mean((0, 1, 2)))


def test_a_row_without_keys_has_mean_0() -> None:
    keep = torch.tensor([[False, False], [True, False]])
    found = call(normal(2, 1, 2, D), normal(2, 1, 2, D, seed=3), keep)
    assert (found["key_mean"][0] == 0).all()
    assert (found["query_mean"][0] == 0).all()


def test_fitted_means_are_not_taken_from_the_call() -> None:
    centred = Centred(Taylor(D)).fit(normal(1, 1, 4, D), normal(1, 1, 4, D, seed=3))
    found = centred.call_tensors(normal(1, 1, 2, D), normal(1, 1, 2, D), key_mask=None, is_causal=True)
    assert dict(found) == {}


def test_half_precision_means_are_summed_in_float32() -> None:
    key = torch.full((1, 1, 5000, D), 1.001, dtype=torch.float16)
    found = call(key, key)["key_mean"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, key[:, :, :1].float(), rtol=1e-5, atol=0)
