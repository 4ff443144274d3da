"""One layer's truth: the limit of each rank, and the rows read off the op."""

from __future__ import annotations

import math

import pytest
import torch

from linattn.hf import AttentionCall
from linattn.methods.measures import relative_error
from linattn.methods.method import parse_method
from linattn_lab.audit.truth import LayerTruth
from linattn_lab.built_methods import build

LENGTH = 12


def call(*, is_causal, kv_heads=2):
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 4, LENGTH, 6), torch.randn(1, kv_heads, LENGTH, 6), torch.randn(1, kv_heads, LENGTH, 5)
    return AttentionCall(0, "", 2 * q, k, v, None, is_causal, 0.5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rank_errors_are_those_of_the_truncated_decomposition(is_causal):
    recorded, first = call(is_causal=is_causal), LENGTH // 2 if is_causal else 0
    truth = LayerTruth(recorded, first=first, num_rows=4)
    ranks = [1, 2, 4, LENGTH - first]
    found = truth.rank_errors(ranks)
    assert found.shape == (4, 4)
    for head in range(4):
        q, k, v = recorded.query[0, head].double(), recorded.key[0, head // 2].double(), recorded.value[0, head // 2]
        logits = 0.5 * q @ k.T
        if is_causal:
            logits = logits.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf)
        matrix = logits.softmax(-1)[first:]
        left, sizes, right = torch.linalg.svd(matrix)
        exact = matrix @ v.double()
        for place, rank in enumerate(ranks):
            cut = left[:, :rank] * sizes[:rank] @ right[:rank]
            expected = (cut @ v.double() - exact).norm() / exact.norm()
            assert found[place, head].item() == pytest.approx(float(expected), rel=1e-6, abs=1e-12)
    assert found[-1].max() < 1e-12


def test_the_error_of_the_weights_falls_with_the_rank():
    recorded = call(is_causal=False)
    # Values that are one-hot read the matrix itself, whose error is what the cut is best for.
    one_hot = torch.eye(LENGTH).expand(1, 2, LENGTH, LENGTH)
    recorded = AttentionCall(0, "", recorded.query, recorded.key, one_hot, None, False, 0.5)
    found = LayerTruth(recorded, first=0, num_rows=4).rank_errors(list(range(1, LENGTH + 1)))
    assert (found.diff(dim=0) < 1e-12).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("label", ["FavorPlus", "FavorPlus + window 2", "Expansion(num_centres=2) + window 2"])
def test_rows_are_those_that_make_the_output(label, is_causal):
    recorded = call(is_causal=is_causal)
    truth = LayerTruth(recorded, first=0, num_rows=LENGTH)
    method = parse_method(label)
    built = build(method, 6, num_features=16 if method.takes_features else None, scale=0.5, seed=0)
    built.fit(recorded.query, recorded.key)
    measured = truth.measure(built)
    rows = truth._rows(built)
    assert rows.shape == (1, 4, LENGTH, LENGTH)
    torch.testing.assert_close(rows.sum(-1), torch.ones(1, 4, LENGTH, dtype=torch.float64))
    value = recorded.value.double().repeat_interleave(2, 1)
    torch.testing.assert_close(measured.error, relative_error(rows @ value, truth._exact), rtol=1e-4, atol=1e-6)


def test_a_window_that_covers_every_key_is_exact():
    recorded = call(is_causal=False)
    truth, method = LayerTruth(recorded, first=0, num_rows=4), parse_method("FavorPlus + window 16")
    measured = truth.measure(build(method, 6, num_features=16, scale=0.5, seed=0))
    assert measured.error.max() < 1e-5
    assert measured.total_variation.max() < 1e-12
    assert measured.kl.abs().max() < 1e-12
