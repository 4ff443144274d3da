"""Measures against values computed by hand or by the definition, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

import linattn
from linattn.methods import measures

# float64 throughout; sums of at most a few hundred terms.
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def sample(batch=2, heads=4, kv_heads=2, length=9, dim=3):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, length, dim), (batch, kv_heads, length, dim), (batch, kv_heads, length, 5))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def test_relative_error_of_each_head():
    exact = torch.zeros(2, 2, 1, 2)
    exact[:, 0], exact[:, 1] = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    approximation = exact.clone()
    approximation[0, 0, 0, 0] += 5.0  # one of the two batch rows: 5 / √(25 + 25)
    approximation[:, 1] = 0.0
    expected = torch.tensor([0.5**0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(measures.relative_error(approximation, exact), expected, **TIGHT)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_relative_error_of_what_is_not_finite(bad):
    exact = torch.ones(1, 2, 3, 2)
    approximation = exact.clone()
    approximation[0, 1, 2, 0] = bad
    assert measures.relative_error(approximation, exact).tolist() == [0.0, math.inf]


def test_relative_error_of_a_head_that_is_zero():
    """A pruned one: 0 where the approximation is zero too, inf where it is not."""
    approximation, exact = torch.zeros(1, 3, 3, 2), torch.zeros(1, 3, 3, 2)
    exact[:, 1], approximation[:, 2, 0] = 1.0, 1e-30
    assert measures.relative_error(approximation, exact).tolist() == [0.0, 1.0, math.inf]


def test_relative_error_refusals():
    with pytest.raises(ValueError, match="shapes differ"):
        measures.relative_error(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_uniform_average_is_attention_with_equal_logits(causal, masked):
    query, key, value = sample()
    mask = None
    if masked:
        mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[:, 0] = True
    expected = linattn.softmax_attention(
        0 * query[:, :, 3:], key, value, key_mask=mask, is_causal=causal, scale=1.0, enable_gqa=True
    )
    value = value if mask is None else value.masked_fill(~mask[:, None, :, None], math.nan)
    ours = measures.uniform_average(value, num_heads=4, num_queries=6, key_mask=mask, is_causal=causal)
    torch.testing.assert_close(ours, expected, **TIGHT)


def test_uniform_average_of_no_key_is_zero():
    mask = torch.tensor([[False, True]])
    value = torch.tensor([[[[5.0], [7.0]]]])
    ours = measures.uniform_average(value, num_heads=1, num_queries=2, key_mask=mask, is_causal=True)
    assert ours.flatten().tolist() == [0.0, 7.0]


def test_uniform_average_refusals():
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        measures.uniform_average(torch.ones(1, 2, 3, 1), num_heads=3, num_queries=3)
    with pytest.raises(ValueError, match="4 causal queries over 3 keys"):
        measures.uniform_average(torch.ones(1, 2, 3, 1), num_heads=2, num_queries=4, is_causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_times_values_is_attention(causal):
    query, key, value = sample()
    index = torch.tensor([0, 4, 8])
    visible = measures.visible_keys(index, num_queries=9, num_keys=9, is_causal=causal)
    rows = measures.softmax_log_rows(query[:, :, index], key, visible, scale=0.7).exp()
    expected = linattn.softmax_attention(query, key, value, is_causal=causal, scale=0.7, enable_gqa=True)
    ours = rows @ value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(ours, expected[:, :, index], **TIGHT)
