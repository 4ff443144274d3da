"""Layers and models whose sequences are split give what they give whole, and train as they do."""

from __future__ import annotations

import pytest

from layers import BIDIRECTIONAL, LAYERS, PADDABLE
from ranks import SIZES
from split_models import HEADS, errors_of_split_heads, layer_errors, losses, refusal_of_heads_split_apart

pytestmark = pytest.mark.xdist_group("ranks")
PARTS = {2: (9, 14), 3: (11, 0, 12), 4: (1, 9, 6, 7)}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(on_ranks, kind):
    for size in SIZES:
        for is_causal in (True, False) if kind in BIDIRECTIONAL else (True,):
            for found in on_ranks(size, layer_errors, kind, is_causal, kind in PADDABLE, PARTS[size]):
                assert max(found.values()) <= 1e-12, (size, is_causal, found)
    for found in on_ranks(2, layer_errors, kind, True, False, (8, 8), equal_lengths=True):
        assert max(found.values()) <= 1e-12, found


def test_a_model_trains_alike_however_it_is_split(on_ranks):
    steps = 12
    alone = on_ranks(2, losses, "alone", steps)[0]
    assert alone[-1] < alone[0]
    for size, over in ((2, "data"), (2, "sequence"), ((2, 2), "both")):
        for found in on_ranks(size, losses, over, steps):
            assert found == pytest.approx(alone, abs=1e-9), over


def test_blocks_that_are_recomputed_exchange_again(on_ranks):
    whole, *_ = on_ranks(2, losses, "sequence", 3)
    for found in on_ranks(2, losses, "sequence", 3, checkpointing=True):
        assert found == pytest.approx(whole, abs=1e-12)


def test_weights_that_are_sharded_train_alike(on_ranks):
    whole, *_ = on_ranks(2, losses, "sequence", 4)
    for found in on_ranks(2, losses, "sequence", 4, sharded=True):
        assert found == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_heads_split_over_ranks(on_ranks, kind):
    """Torch's tensor parallelism, which gives a rank some of the heads, each as wide as before."""
    for found in on_ranks(2, errors_of_split_heads, kind):
        assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("kind", ["linear", "softmax"])
@pytest.mark.parametrize("names", [*((name,) for name in HEADS), HEADS[1:]], ids="+".join)
def test_heads_split_otherwise_for_queries_than_for_keys_are_refused(on_ranks, kind, names):
    for found in on_ranks(2, refusal_of_heads_split_apart, kind, names):
        assert "split all three over ranks alike" in found
