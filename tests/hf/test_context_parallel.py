"""Linearized models on parts of texts give the logits and gradients of the whole, wrapped or not."""

from __future__ import annotations

import pytest

from ranks import NUM_RANKS
from split_transformers import accelerated_errors, positions_given, refused, transformer_errors

pytestmark = pytest.mark.xdist_group("ranks")
# Rounding in float64, through two layers of a model.
BOUND = 1e-11
WINDOWED, PLAIN = "FavorPlus(num_features=8) + window 4", "FavorPlus(num_features=8)"


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "opt"])
def test_parts_of_a_text(on_ranks, family):
    for method, lengths, is_equal in ((WINDOWED, (13, 7), False), (PLAIN, (10, 10), True)):
        for found in on_ranks(2, transformer_errors, family, method, lengths, equal_lengths=is_equal):
            assert max(found.values()) <= BOUND, (method, found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_that_accelerate_has_wrapped(on_ranks, family):
    for found in on_ranks(NUM_RANKS, accelerated_errors, family):
        assert max(found.values()) <= BOUND, found


def test_positions_that_are_given_are_taken(on_ranks):
    for found in on_ranks(2, positions_given):
        assert found <= BOUND


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("softmax", "attends by softmax"),
        ("window", "model.layers.0.self_attn attends by softmax"),
        ("merged", "which keys are merged is decided over all of a sequence"),
        ("labels", "shift them before the text is split"),
        ("positions", "pass position_ids of the whole text"),
        ("shown tokens", "pass position_ids of the whole text"),
        ("block", "is given parts of texts already; leave that block first"),
        ("cache", "pass use_cache=False"),
    ],
)
def test_what_is_refused(on_ranks, fault, message):
    for found in on_ranks(2, refused, fault):
        assert message in found
