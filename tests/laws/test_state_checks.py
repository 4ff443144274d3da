"""A state is whole or refused: every tensor of one that was read from a file or built by hand; decays."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from linattn import Exact, State
from linattn.feature_maps import FavorPlus, FeatureMap, Relu

STREAMS: dict[str, tuple[FeatureMap | None, Exact | None]] = {
    "map": (FavorPlus(8, 16), None),
    "window": (FavorPlus(8, 16), Exact(4)),
    "heavy": (FavorPlus(8, 16), Exact(4, 3)),
    "merged": (None, Exact(4, num_merged=8)),
    "merged in 4 bits": (None, Exact(4, num_merged=8, bits=4)),
}
SUMS, EXACT, MERGED = (
    ["S", "z", "m"],
    [*["exact.heavy"] * 4, *["exact.recent"] * 4],
    ["exact.sample"] * 2 + ["exact.recent"] * 3,
)
# Which record each tensor belongs to, as errors name it.
RECORDS = {
    "map": SUMS,
    "window": SUMS + EXACT,
    "heavy": SUMS + EXACT,
    "merged": SUMS + ["exact.merged"] * 3 + MERGED,
    "merged in 4 bits": SUMS + ["exact.merged"] * 11 + MERGED,
}
# Sizes are read from S and, without a map, from the latest keys: where these are wrong, others differ.
OTHERS = r"the state's (z|m|exact[\w.]+)"
CHANGES = {
    "shorter": lambda x: x[..., :-1],
    "longer": lambda x: torch.cat((x, x), -1),
    "another batch": lambda x: torch.cat((x, x)),
    "another dtype": lambda x: x.to(torch.int32),
    "half": lambda x: x.half() if x.dtype == torch.float32 else x.double(),
    "another device": lambda x: x.to("meta"),
}


def tokens(length: int = 30) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 8, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STREAMS)
def test_every_tensor_of_a_state_is_checked(name: str, change: str) -> None:
    feature_map, exact = STREAMS[name]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, exact=exact).state
    leaves, tree = pytree.tree_flatten(state)
    for number, (leaf, record) in enumerate(zip(leaves, RECORDS[name], strict=True)):
        # Tokens of a window are kept in the dtype they came in, and keys and values alike.
        match = rf"the state's {record}[\w.]* must be .*, got "
        if number == 0:
            match = f"{match}|{OTHERS} must be|the state (holds|is kept in|is on)"
        elif leaf.ndim == 4 and record == "exact.recent":
            match = f"{match}|{OTHERS} must be"
        # None of no tokens is shorter, and a value width is known by tokens alone.
        if change in ("shorter", "longer") and (leaf.shape[-1] == 0 or (name == "map" and number == 0)):
            continue
        wrong = pytree.tree_unflatten([*leaves[:number], CHANGES[change](leaf), *leaves[number + 1 :]], tree)
        with pytest.raises(ValueError, match=match):
            linattn.linear_attention_with_state(*tokens(1), feature_map, wrong, exact=exact)
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
    wrong = dataclasses.replace(state, z=state.z[..., :1]).known_to_fit((8, 1))
    file = io.BytesIO()
    torch.save(wrong, file)
    file.seek(0)
    with pytest.raises(ValueError, match=r"the state's z must be torch.float32 of shape \(1, 2, 16\)"):
        linattn.linear_attention_with_state(*tokens(1), feature_map, torch.load(file))


@pytest.mark.parametrize("name", ["merged", "merged in 4 bits"])
def test_tokens_of_another_width_or_fewer_query_heads_are_refused(name: str) -> None:
    _, exact = STREAMS[name]
    query, key, value = tokens()
    state = linattn.linear_attention_with_state(query, key, value, None, exact=exact).state
    with pytest.raises(ValueError, match=r"the state's exact.recent.key must be torch.float32 of shape \(1, 2, 6, 4\)"):
        linattn.linear_attention_with_state(query[..., :4], key[..., :4], value, None, state, exact=exact)
    many = query.repeat_interleave(20, 1)
    state = linattn.linear_attention_with_state(many, key, value, None, exact=exact, enable_gqa=True).state
    with pytest.raises(ValueError, match=r"the state's exact.sample.there must be of shape \(B, H, n ≤ 16\)"):
        linattn.linear_attention_with_state(query, key, value, None, state, exact=exact)


def test_merged_keys_beyond_the_rule_are_refused() -> None:
    _, exact = STREAMS["merged"]
    state = linattn.linear_attention_with_state(*tokens(), None, exact=exact).state
    many = dataclasses.replace(state.exact, merged=state.exact.merged.then(state.exact.merged))
    state = State(state.S, state.z, state.m, state.built_with, many)
    for backend in ("auto", "blocked"):
        with pytest.raises(ValueError, match=r"exact.merged.bias must be of shape \(B, H, n ≤ 8\)"):
            linattn.linear_attention_with_state(*tokens(100), None, state, exact=exact, backend=backend)


@pytest.mark.parametrize(
    "wrong",
    [{"window": 4.0}, {"window": 0}, {"window": 3}, {"num_heavy": -1}, {"num_heavy": True}, {"num_merged": 2**62}],
    ids=str,
)
def test_a_rule_that_is_read_from_a_file_is_checked(wrong: dict[str, object]) -> None:
    feature_map, exact = FavorPlus(8, 16), Exact(4, 3)
    state = linattn.linear_attention_with_state(*tokens(), feature_map, exact=exact).state
    state.exact.rule.__dict__.update(wrong)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} must be"):
        torch.load(file)
    with pytest.raises(ValueError, match="must be a non-negative integer below 2³¹, got 2147483648"):
        Exact(4, num_merged=2**31)


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
    feature_map, exact = STREAMS[name]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, exact=exact).state
    leaves, tree = pytree.tree_flatten(state)
    for number, leaf in enumerate(leaves):
        wrong = pytree.tree_unflatten([*leaves[:number], torch.cat((leaf, leaf)), *leaves[number + 1 :]], tree)
        with pytest.raises(ValueError, match=r"the state's \S+ must be"):
            wrong.select(torch.tensor([0]))


@pytest.mark.parametrize("name", ["window", "heavy", "merged"])
def test_a_decay_heals_no_exact_keys(name: str) -> None:
    feature_map, exact = STREAMS[name]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, exact=exact).state
    recent = state.exact.recent
    wrong = dataclasses.replace(state.exact, recent=recent._replace(bias=recent.bias[:, :1]))
    with pytest.raises(ValueError, match=r"the state's exact.recent.bias must be torch.float32 of shape \(1, 2, 6\)"):
        dataclasses.replace(state, exact=wrong).decay(-1.0)


@pytest.mark.parametrize("name", STREAMS)
def test_a_decay_by_minus_infinity_is_the_empty_state(name: str) -> None:
    feature_map, exact = STREAMS[name]
    state = linattn.linear_attention_with_state(*tokens(), feature_map, exact=exact).state.decay(-math.inf)
    query, key, value = tokens(1)
    part = state.read(feature_map, query)
    assert not part.out.any()
    assert bool((part.log_normalizer == -math.inf).all())
    masked = linattn.linear_attention_with_state(
        query, key, value, feature_map, state, exact=exact, key_mask=torch.zeros(1, 1, dtype=torch.bool)
    )
    assert not masked.out.any()
    for before in (state, masked.state):
        out = linattn.linear_attention_with_state(query, key, value, feature_map, before, exact=exact).out
        # One token alone gives its value: a product and a division in float32, beside rounding to 4 bits none.
        torch.testing.assert_close(out, value, rtol=1e-5, atol=1e-5)


def test_after_a_decay_by_minus_infinity_new_keys_are_the_heavy_ones() -> None:
    feature_map, exact = STREAMS["heavy"]
    # Whole blocks, so that the next one begins as a stream does.
    state = linattn.linear_attention_with_state(*tokens(32), feature_map, exact=exact).state.decay(-math.inf)
    after, fresh = (
        linattn.linear_attention_with_state(*tokens(20), feature_map, before, exact=exact).out
        for before in (state, None)
    )
    # The map's exponents of some tens, rounded in float32.
    torch.testing.assert_close(after, fresh, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("factor", [math.nan, math.inf, torch.tensor([[0.0, math.inf]])], ids=str)
def test_a_decay_by_no_factor_is_refused(factor: float | Tensor) -> None:
    state = State.empty(Relu(8), batch_size=1, num_heads=2, value_dim=8)
    with pytest.raises(ValueError, match="log_factor must be finite, or -inf"):
        state.decay(factor)


def test_gradients_of_a_decay_by_minus_infinity_are_finite() -> None:
    feature_map = FavorPlus(8, 16)
    query, key, value = tokens()
    state = State.empty(feature_map, batch_size=1, num_heads=2, value_dim=8).absorb(feature_map, key, value)
    factor = torch.tensor([[-math.inf, -0.5]], requires_grad=True)
    linattn.linear_attention_with_state(query, key, value, feature_map, state.decay(factor)).out.sum().backward()
    assert bool(factor.grad.isfinite().all())
    assert factor.grad[0, 0] == 0
