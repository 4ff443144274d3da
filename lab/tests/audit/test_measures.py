"""Measures of rows and of logits against values computed by hand or by the definition, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

import linattn
from linattn.methods import measures
from linattn_lab.audit.moments import logit_std, pair_moments, predicted_ratio
from linattn_lab.audit.row_measures import kl_divergence, total_variation
from linattn_lab.variance import relative_variance

# float64 throughout; sums of at most a few hundred terms.
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def query_and_key():
    """Two query heads to a key head."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, 9, 3, generator=generator, dtype=torch.float64) for heads in (4, 2))


def test_total_variation_and_divergence_of_two_heads():
    log_exact = torch.tensor([[[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]]]], dtype=torch.float64).log()
    weights = torch.tensor([[[[0.25, 0.75, 0.0]], [[0.5, 0.25, 0.25]]]], dtype=torch.float64)
    assert total_variation(log_exact, weights).tolist() == [0.25, 0.5]
    expected = torch.tensor([0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(kl_divergence(log_exact, weights), expected, **TIGHT)


def test_divergence_of_weights_that_are_not_positive():
    log_exact = torch.tensor([0.5, 0.5], dtype=torch.float64).log().expand(1, 3, 2, 2)
    weights = torch.full((1, 3, 2, 2), 0.5, dtype=torch.float64)
    weights[0, 0, 1] = torch.tensor([1.5, -0.5])
    weights[0, 1, 0] = torch.tensor([1.0, 0.0])
    found = kl_divergence(log_exact, weights)
    assert found.isnan().tolist() == [True, True, False]
    assert found[2] == 0
    assert total_variation(log_exact, weights).tolist() == [0.5, 0.25, 0.0]


def test_total_variation_of_what_is_not_finite():
    log_exact = torch.tensor([0.5, 0.5]).log().expand(1, 1, 1, 2)
    assert total_variation(log_exact, torch.tensor([math.nan, 1.0])).tolist() == [math.inf]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0, 4])
def test_pair_moments_pair_by_pair(causal, first):
    query, key = query_and_key()
    scale = 0.3
    x, y = scale**0.5 * query, scale**0.5 * key.repeat_interleave(2, dim=1)
    pairs = torch.ones(9, 9, dtype=torch.bool)
    pairs = (pairs.tril() if causal else pairs) & (torch.arange(9) >= first)[:, None]
    sums = (x.unsqueeze(3) + y.unsqueeze(2)).square().sum(-1)[:, :, pairs]
    differences = (x.unsqueeze(3) - y.unsqueeze(2)).square().sum(-1)[:, :, pairs]
    found = pair_moments(query, key, scale=scale, first_query=first, is_causal=causal)
    torch.testing.assert_close(found.sum_square, sums.mean(dim=(0, 2)), **TIGHT)
    torch.testing.assert_close(found.difference_square, differences.mean(dim=(0, 2)), **TIGHT)
    torch.testing.assert_close(found.query_norm, x[:, :, first:].norm(dim=-1).mean(dim=(0, 2)), **TIGHT)
    torch.testing.assert_close(found.key_norm, y.norm(dim=-1).mean(dim=(0, 2)), **TIGHT)


def test_pair_moments_refusals():
    query, key = query_and_key()
    with pytest.raises(ValueError, match="scale must be positive"):
        pair_moments(query, key, scale=-1.0)
    with pytest.raises(ValueError, match="9 queries and 8 keys"):
        pair_moments(query, key[:, :, 1:], scale=1.0)


def test_logit_std_is_that_of_the_logits():
    query, key = query_and_key()
    index = torch.tensor([2, 7])
    visible = measures.visible_keys(index, num_queries=9, num_keys=9, is_causal=True)
    rows = measures.softmax_log_rows(query[:, :, index], key, visible, scale=0.7)
    logits = 0.7 * query @ key.repeat_interleave(2, dim=1).mT
    each = torch.stack([logits[:, :, i, : i + 1].var(dim=-1, unbiased=False) for i in (2, 7)], dim=-1)
    torch.testing.assert_close(logit_std(rows, visible), each.mean(dim=(0, 2)).sqrt(), **TIGHT)


def test_predicted_ratio_at_flat_logits_is_infinite():
    zero = torch.zeros(1, dtype=torch.float64)
    assert predicted_ratio(zero + 0.5, zero).tolist() == [math.inf]
    # At sharp logits averaging's relative error is 1 and the ratio is the deviation alone.
    assert predicted_ratio(zero + 0.25, zero + 10).tolist() == [0.5]


def test_prediction_against_measurement():
    """Gaussian queries and keys of small norm: the prediction holds within its factor of two."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 64, 128, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    scale = 0.0625
    exact = linattn.softmax_attention(query, key, value, scale=scale)
    uniform = measures.uniform_average(value, num_heads=64, num_queries=128)
    favor = linattn.feature_maps.FavorPlus(16, 64, scale=scale, num_heads=64)
    ours = linattn.linear_attention(query, key, value, favor)
    measured = measures.relative_error(ours, exact) / measures.relative_error(uniform, exact)
    moments = pair_moments(query, key, scale=scale)
    visible = torch.ones(128, 128, dtype=torch.bool)
    spread = logit_std(measures.softmax_log_rows(query, key, visible, scale=scale), visible)
    predicted = predicted_ratio(relative_variance(favor, moments.sum_square, moments.difference_square), spread)
    assert 0.5 < float((predicted / measured).mean()) < 2.0
