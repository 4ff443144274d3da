"""Audits and conversions whose parts several processes do find what one process finds."""

from __future__ import annotations

import pytest
import torch

from ranks import NUM_RANKS
from split_work import audited, converted, step_gradients

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_an_audit_has_the_rows_of_one_process(on_ranks, folder, prose, family):
    alone = audited(None, folder(family), prose)
    assert len(alone) > 80
    for found in on_ranks(NUM_RANKS, audited, folder(family), prose):
        assert found == alone


def test_a_conversion_is_one_processs(on_ranks, folder):
    method = "Centred(LearnedExponential(num_features=8))"
    alone, weights = converted(None, folder("bert"), method)
    every = on_ranks(NUM_RANKS, converted, folder("bert"), method)
    for found, theirs in every:
        # Before training to the bit; then gradients are summed in another order, and AdamW's steps have a length of
        # their own, however small the gradient.
        assert found == every[0][0]
        assert found.stages[:2] == alone.stages[:2]
        assert (found.method, found.linearization) == (alone.method, alone.linearization)
        assert [one.steps for one in found.trainings] == [one.steps for one in alone.trainings]
        for ours, truth in zip(found.trainings, alone.trainings, strict=True):
            assert ours.first_loss == pytest.approx(truth.first_loss, rel=1e-6)
            assert ours.best_loss == pytest.approx(truth.best_loss, rel=1e-3)
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-3, atol=1e-3)
            assert torch.equal(theirs[name], every[0][1][name])


@pytest.mark.parametrize("name", ["transfer", "distillation"])
def test_a_step_has_the_gradients_of_all_its_texts(on_ranks, folder, name):
    alone = step_gradients(None, folder("bert"), name)
    assert alone
    for found in on_ranks(NUM_RANKS, step_gradients, folder("bert"), name):
        for weight, grad in alone.items():
            torch.testing.assert_close(found[weight], grad, rtol=1e-9, atol=1e-12)
