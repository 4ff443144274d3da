"""Faults found in public implementations, each as a case this library must not repeat.

Others are laws elsewhere: masks that do not mask (test_masking), states unwound by subtraction (test_gradient), sums
kept in bfloat16 (test_convexity), tokens that do not mix (test_causality), sums over the heads axis
(test_independence), orthogonal draws biased by an unsigned QR and dead DPFP features (tests/feature_maps).
"""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import BACKENDS, build, qkv, relative_error, tokens


def exact_favor(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, feature_map) -> torch.Tensor:
    """Positive-random-feature attention from exponents in float64, without stabiliser or epsilon."""
    lq, lk = feature_map.query(query.double()), feature_map.key(key.double())
    weights = torch.softmax(torch.logsumexp(lq.unsqueeze(-2) + lk.unsqueeze(-3), -1), -1)
    return weights @ value.double()


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5, 2.0, 6.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_epsilon_turns_attention_into_averaging(backend: str, scale: float) -> None:
    """With an epsilon of 1e-4 on stabilised features, inputs of scale 1.5 give the uniform average to 0.001."""
    feature_map = linattn.feature_maps.FavorPlus(64, 266)
    query, key = (tokens(1, 1, 128, 64, seed=s, scale=scale, dtype=torch.float32) for s in (0, 1))
    value = tokens(1, 1, 128, 64, seed=2, dtype=torch.float32)
    found = linattn.linear_attention(query, key, value, feature_map, backend=backend)
    truth = exact_favor(query, key, value, feature_map)
    # Exponents reach |k|² · scale / 2 = 4 · scale²: float32 rounds them to 2^-24 of that, times a few tens of terms.
    assert relative_error(found, truth) <= 1e-5 * max(1, scale**2)
    if scale >= 1.5:
        uniform = value.mean(2, keepdim=True).expand_as(value)
        assert relative_error(found, uniform) > 0.5


def test_the_last_key_does_not_move_the_stabiliser_of_earlier_ones() -> None:
    """A global key maximum with an epsilon changes earlier causal outputs by 0.7 to 2.5."""
    feature_map = linattn.feature_maps.FavorPlus(32, 128)
    query, key, value = (tokens(1, 1, 64, 32, seed=s, dtype=torch.float32) for s in range(3))
    before = linattn.linear_attention(query, key, value, feature_map, is_causal=True)
    for factor in (2, 3, 4):
        louder = key.clone()
        louder[:, :, -1] *= factor
        after = linattn.linear_attention(query, louder, value, feature_map, is_causal=True)
        torch.testing.assert_close(after[:, :, :-1], before[:, :, :-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["FavorPlus", "EluPlusOne"])
def test_both_sums_are_masked(name: str) -> None:
    """64 real and 64 padded tokens: masking the values alone gives 0.5 instead of 1 for V = 1."""
    query, key, _ = qkv(num_queries=128, num_keys=128)
    mask = torch.zeros(2, 128, dtype=torch.bool)
    mask[:, :64] = True
    ones = torch.ones(2, 2, 128, 1, dtype=torch.float64)
    found = linattn.linear_attention(query, key, ones, build(name), key_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-12, atol=0)


def test_outputs_do_not_depend_on_the_total_length() -> None:
    """Positions normalised by the total length change the first causal outputs by 0.24 when the sequence is longer."""
    query, key, value = qkv(num_queries=128, num_keys=128)
    feature_map = build("FavorPlus")
    long = linattn.linear_attention(query, key, value, feature_map, is_causal=True, enable_gqa=True)
    short = linattn.linear_attention(
        *(x[:, :, :32] for x in (query, key, value)), feature_map, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(long[:, :, :32], short, rtol=1e-12, atol=1e-12)


def test_every_backend_has_the_same_defaults() -> None:
    """One public op normalised in one mode and not in the other."""
    query, key, value = qkv()
    for name in ("FavorPlus", "Relu"):
        results = [
            linattn.linear_attention(query, key, value, build(name), enable_gqa=True, backend=backend)
            for backend in BACKENDS
        ]
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
