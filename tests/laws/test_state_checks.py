"""A state is whole or refused: every tensor of one that was read from a file or built by hand; decays."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from damaged_states import CHANGES, read_again, tokens
from linattn import State
from linattn.feature_maps import FavorPlus, FeatureMap, Relu

STREAMS: dict[str, tuple[FeatureMap, int | None]] = {
    "map": (FavorPlus(8, 16), None),
    "window": (FavorPlus(8, 16), 4),
}
SUMS = ["S", "z", "m"]
# Which record each tensor belongs to, as errors name it.
RECORDS = {"map": SUMS, "window": [*SUMS, *["window.recent"] * 3]}
# Sizes are read from S: where it is wrong, others differ.
OTHERS = r"the state's (z|m|window[\w.]+)"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STREAMS)
def test_every_tensor_of_a_state_is_checked(name: str, change: str) -> None:
    feature_map, window = STREAMS[name]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, window=window).state
    leaves, tree = pytree.tree_flatten(state)
    for number, (leaf, record) in enumerate(zip(leaves, RECORDS[name], strict=True)):
        # Tokens of a window are kept in the dtype they came in, and keys and values alike.
        match = rf"the state's {record}[\w.]* must be .*, got "
        if number == 0:
            match = f"{match}|{OTHERS} must be|the state (holds|is kept in|is on)"
        elif leaf.ndim == 4 and record == "window.recent":
            match = f"{match}|{OTHERS} must be"
        # None of no tokens is shorter, and a value width is known by tokens alone.
        if change in ("shorter", "longer") and (leaf.shape[-1] == 0 or (name == "map" and number == 0)):
            continue
        wrong = pytree.tree_unflatten([*leaves[:number], CHANGES[change](leaf), *leaves[number + 1 :]], tree)
        with pytest.raises(ValueError, match=match):
            linattn.linear_attention_with_state(*tokens(1), feature_map, wrong, window=window)
        with pytest.raises(ValueError, match=match):
            wrong.read(feature_map, tokens(1)[0])


def test_sums_of_another_number_of_features_are_refused() -> None:
    feature_map = Relu(8)
    state = linattn.linear_attention_with_state(*tokens(), feature_map).state
    wrong = State(*(torch.cat((x, x), 2) for x in (state.S, state.z)), state.m, state.built_with)
    with pytest.raises(ValueError, match=r"the state's S must be torch.float32 of shape \(1, 2, 8, 8\)"):
        linattn.linear_attention_with_state(*tokens(1), feature_map, wrong)


def test_a_file_does_not_say_that_its_state_was_looked_at() -> None:
    feature_map, _ = STREAMS["map"]
    state = linattn.linear_attention_with_state(*tokens(), feature_map).state
    wrong = dataclasses.replace(state, z=state.z[..., :1]).known_to_fit(8)
    with pytest.raises(ValueError, match=r"the state's z must be torch.float32 of shape \(1, 2, 16\)"):
        linattn.linear_attention_with_state(*tokens(1), feature_map, read_again(wrong))


@pytest.mark.parametrize("width", [4.0, 0, 3, True, -4, 2**31])
def test_a_window_s_width_that_is_read_from_a_file_is_checked(width: object) -> None:
    feature_map, window = STREAMS["window"]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, window=window).state
    vars(state.window)["width"] = width
    wrong = read_again(state)
    for use in (
        lambda: linattn.linear_attention_with_state(*tokens(1), feature_map, wrong, window=width),
        lambda: wrong.read(feature_map, tokens(1)[0]),
        lambda: wrong.flush(feature_map),
        lambda: wrong.decay(-1.0),
    ):
        with pytest.raises((TypeError, ValueError), match=r"window must be (an integer or None|a power of two)"):
            use()


@pytest.mark.parametrize("window", [4, "window", torch.zeros(1)], ids=str)
def test_what_holds_no_window_s_keys_is_refused(window: object) -> None:
    feature_map, _ = STREAMS["map"]
    state = linattn.linear_attention_with_state(*tokens(), feature_map).state
    wrong = dataclasses.replace(state, window=window)
    for use in (
        lambda: linattn.linear_attention_with_state(*tokens(1), feature_map, wrong, window=4),
        lambda: wrong.read(feature_map, tokens(1)[0]),
        lambda: wrong.decay(-1.0),
    ):
        with pytest.raises((TypeError, ValueError), match=r"the state('s window must be a WindowKeys| was built with)"):
            use()


def test_a_state_without_a_window_is_read_as_an_earlier_version_wrote_it() -> None:
    feature_map, _ = STREAMS["map"]
    state = linattn.linear_attention_with_state(*tokens(), feature_map).state
    earlier = dataclasses.replace(state)
    del vars(earlier)["window"]
    vars(earlier)["exact"] = None
    found = read_again(earlier)
    assert vars(found).keys() == vars(dataclasses.replace(state)).keys()
    after, wanted = (linattn.linear_attention_with_state(*tokens(7), feature_map, one).out for one in (found, state))
    assert torch.equal(after, wanted)


@pytest.mark.parametrize("field", ["S", "z", "m"])
def test_no_verb_heals_sums_that_do_not_belong_together(field: str) -> None:
    feature_map, _ = STREAMS["map"]
    state = linattn.linear_attention_with_state(*tokens(), feature_map).state
    wrong = dataclasses.replace(state, **{field: getattr(state, field)[:, :, :1]})
    for use in (
        lambda: wrong.decay(-1.0).read(feature_map, tokens(1)[0]),
        lambda: wrong.merge(state),
        lambda: state.merge(wrong),
        lambda: wrong.absorb(feature_map, *tokens(1)[1:]),
    ):
        with pytest.raises(ValueError, match=r"the state's (S|z|m) must be|cannot merge states of shapes .* of (S|m)"):
            use()


@pytest.mark.parametrize("name", STREAMS)
def test_a_selection_heals_no_state(name: str) -> None:
    feature_map, window = STREAMS[name]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, window=window).state
    leaves, tree = pytree.tree_flatten(state)
    for number, leaf in enumerate(leaves):
        wrong = pytree.tree_unflatten([*leaves[:number], torch.cat((leaf, leaf)), *leaves[number + 1 :]], tree)
        with pytest.raises(ValueError, match=r"the state's \S+ must be"):
            wrong.select(torch.tensor([0]))


def test_a_decay_heals_no_window() -> None:
    feature_map, window = STREAMS["window"]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, window=window).state
    recent = state.window.recent
    wrong = dataclasses.replace(state.window, recent=recent._replace(bias=recent.bias[:, :1]))
    with pytest.raises(ValueError, match=r"the state's window.recent.bias must be torch.float32 of shape \(1, 2, 6\)"):
        dataclasses.replace(state, window=wrong).decay(-1.0)


@pytest.mark.parametrize("name", STREAMS)
def test_a_decay_by_minus_infinity_is_the_empty_state(name: str) -> None:
    feature_map, window = STREAMS[name]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, window=window).state.decay(-math.inf)
    query, key, value = tokens(1)
    part = state.read(feature_map, query)
    assert not part.out.any()
    assert bool((part.log_normalizer == -math.inf).all())
    masked = linattn.linear_attention_with_state(
        query, key, value, feature_map, state, window=window, key_mask=torch.zeros(1, 1, dtype=torch.bool)
    )
    assert not masked.out.any()
    for before in (state, masked.state):
        out = linattn.linear_attention_with_state(query, key, value, feature_map, before, window=window).out
        # One token alone gives its value: a product and a division in float32.
        torch.testing.assert_close(out, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [math.nan, math.inf, torch.tensor([[0.0, math.inf]])], ids=str)
def test_a_decay_by_no_factor_is_refused(factor: float | Tensor) -> None:
    state = State.empty(Relu(8), batch_size=1, num_heads=2, value_dim=8)
    with pytest.raises(ValueError, match="log_factor must be finite, or -inf"):
        state.decay(factor)
    for other, kind in ((1j, "complex"), (torch.tensor(1j), r"torch\.complex64"), ("x", "str"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"log_factor must be a number or a floating tensor, got {kind}"):
            state.decay(other)


def test_gradients_of_a_decay_by_minus_infinity_are_finite() -> None:
    feature_map = FavorPlus(8, 16)
    query, key, value = tokens()
    state = State.empty(feature_map, batch_size=1, num_heads=2, value_dim=8).absorb(feature_map, key, value)
    factor = torch.tensor([[-math.inf, -0.5]], requires_grad=True)
    linattn.linear_attention_with_state(query, key, value, feature_map, state.decay(factor)).out.sum().backward()
    assert bool(factor.grad.isfinite().all())
    assert factor.grad[0, 0] == 0


def test_a_state_of_no_heads_is_not_read() -> None:
    feature_map, _ = STREAMS["map"]
    whole = linattn.linear_attention_with_state(*tokens(), feature_map).state
    none = dataclasses.replace(whole, S=whole.S[:, :0], z=whole.z[:, :0], m=whole.m[:, :0])
    for query in (tokens(1)[0], tokens(1)[0][:, :0]):
        with pytest.raises(ValueError, match=r"a multiple of 0 heads"):
            none.read(feature_map, query)


def test_queries_in_another_precision_read_no_state() -> None:
    """They would be rounded to the state's, and be called wider."""
    feature_map, _ = STREAMS["map"]
    query, *_ = tokens()
    state = linattn.linear_attention_with_state(*tokens(), feature_map).state
    other = torch.float64 if state.S.dtype == torch.float32 else torch.float32
    with pytest.raises(ValueError, match=f"the state is kept in {state.S.dtype}, got queries of {other}"):
        state.read(feature_map, query.to(other))
