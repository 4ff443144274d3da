"""Ranks that make different calls are all told which rank has what, and none waits for another."""

from __future__ import annotations

import pytest

from split_disagreements import CHANGES, call_told, compiled_told, layer_told, trained_told, ways_told

pytestmark = pytest.mark.xdist_group("ranks")


def check(messages: list[str], *wanted: str) -> None:
    """All ranks are told the same, which names the last one."""
    assert set(messages) == {messages[0]}
    assert "every rank must make the same call" in messages[0]
    for words in wanted:
        assert words in messages[0]


@pytest.mark.parametrize(
    ("change", "way", "field"),
    [
        *((name, "states", "feature_map") for name in ("seed", "scale", "features", "class")),
        ("direction", "states", "is_causal ("),
        ("window", "states", "window ("),
        ("heads", "states", "query heads ("),
        ("gqa", "states", "enable_gqa ("),
        *((name, "states", "backend (") for name in ("backend", "refusal")),
        *(("dtype", way, "key dtype (") for way in ("states", "absorb")),
        *(("groups", way, "key heads (") for way in ("states", "absorb")),
        *(("batch", way, "batch size (") for way in ("states", "absorb")),
        *(("value width", way, "value width (") for way in ("states", "absorb")),
        *(("gates", way, "gates (") for way in ("states", "absorb")),
        *(("gradients", way, "gradients (") for way in ("states", "absorb")),
        *((name, "absorb", "feature_map (") for name in ("seed", "class")),
        ("lengths", "states", "lengths (rank 0 has None, rank 1 has given)"),
    ],
)
def test_a_rank_in_another_call_is_named_on_all(on_ranks, change, way, field):
    check(on_ranks(2, call_told, way, {}, CHANGES[change]), field, "rank 1 has")


def test_ranks_are_counted_by_what_they_have(on_ranks):
    check(on_ranks(3, call_told, "states", {}, CHANGES["batch"]), "batch size (ranks 0, 1 have 2, rank 2 has 3)")


@pytest.mark.parametrize("way", ["states", "absorb"])
def test_weights_that_differ_are_named(on_ranks, way):
    check(on_ranks(2, call_told, way, {"map": "learned"}, CHANGES["weights"]), "feature_map (", "with weights")


@pytest.mark.parametrize("change", ["no window", "seed", "direction", "value width"])
def test_a_call_with_a_window(on_ranks, change):
    check(on_ranks(2, call_told, "states", {"window": 4}, CHANGES[change]), "rank 1 has")


def test_ranks_in_different_functions_meet(on_ranks):
    for ways in (("absorb", "states"), ("states", "absorb")):
        check(on_ranks(2, ways_told, ways), "call (rank 0 has parallel.", "rank 1 has parallel.")


def test_a_call_that_one_rank_refuses_is_refused_on_all(on_ranks):
    check(on_ranks(2, call_told, "states", {}, CHANGES["refusal"]), "rank 1 refuses its call: ", "quick")


@pytest.mark.parametrize("change", ["key_mask", "key_bias"])
def test_weights_of_keys_that_only_one_rank_has_are_its_own_where_states_are_sent(on_ranks, change):
    assert on_ranks(2, call_told, "states", {"is_causal": True}, CHANGES[change]) == ["nothing"] * 2


def test_a_step_of_one_rank_alone_is_noticed_at_the_next_call(on_ranks):
    first, second = zip(*on_ranks(2, trained_told), strict=True)
    assert first == ("nothing", "nothing")
    check(list(second), "feature_map (", "rank 1 has LearnedExponential")


@pytest.mark.parametrize("change", [{"seed": 1}, {"is_causal": False}, {"batch": 3}])
def test_compiled_calls(on_ranks, change):
    check(on_ranks(2, compiled_told, change), "rank 1 has")


def test_compiled_calls_that_agree(on_ranks):
    assert on_ranks(2, compiled_told, {}) == ["nothing"] * 2


@pytest.mark.parametrize(
    ("kind", "fault", "field"),
    [
        ("linear", "seed", "feature_map ("),
        ("linear", "direction", "layer ("),
        ("softmax", "direction", "layer ("),
        ("linear", "equal", "equal_lengths ("),
        *((kind, "mask", "with key_mask") for kind in ("linear", "softmax")),
        *((kind, "batch", "batch size (") for kind in ("linear", "softmax", "bare")),
        *((kind, "unequal", "lengths[0] (") for kind in ("linear", "softmax", "bare")),
    ],
)
def test_layers(on_ranks, kind, fault, field):
    check(on_ranks(2, layer_told, kind, fault), field, "rank 1 has")
