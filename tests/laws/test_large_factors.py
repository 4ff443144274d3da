"""A factor of any size on a state's weights keeps their digits: what reads the state, alone or with tokens, sees it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import linattn
from linattn import State
from linattn.feature_maps import Expansion, FavorPlus, FeatureMap, Relu
from linattn.positions import FixedDecay, Gates, gated_attention_with_state


def tokens(length: int, seed: int = 0, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, length, 8, generator=generator) for _ in range(3)]


STREAMS: dict[str, tuple[FeatureMap, int | None]] = {
    "exponential": (FavorPlus(8, 16), None),
    "linear": (Relu(8), None),
    "grouped": (Expansion(8, 3).fit(*tokens(20, 9)[:2]), None),
    "window": (FavorPlus(8, 16), 4),
}
FACTORS = [1e3, -1e3, 1e5, -1e5, 1e7, -1e7, 1e12, -1e30, 1e38]
# Sums of few numbers of size 1, in another order.
ROUNDING = {"rtol": 2**-19, "atol": 2**-19}
NONE = torch.zeros(1, 1, dtype=torch.bool)


def stream(name: str, length: int = 30) -> State:
    feature_map, window = STREAMS[name]
    return linattn.linear_attention_with_state(*tokens(length), feature_map, window=window).state


def after(name: str, state: State | None, length: int = 1, **options: object) -> linattn.Attended:
    feature_map, window = STREAMS[name]
    return linattn.linear_attention_with_state(*tokens(length, 1), feature_map, state, window=window, **options)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", STREAMS)
def test_a_state_is_read_as_before_beside_it(name: str, factor: float) -> None:
    state, (feature_map, _) = stream(name), STREAMS[name]
    decayed, query = state.decay(factor), tokens(3, 2)[0]
    found, wanted = decayed.read(feature_map, query), state.read(feature_map, query)
    torch.testing.assert_close(found.out, wanted.out, **ROUNDING)
    torch.testing.assert_close(found.log_normalizer, wanted.log_normalizer + factor, rtol=2**-23, atol=0)
    for backend in ("auto", "blocked"):
        masked = after(name, decayed, key_mask=NONE, backend=backend)
        torch.testing.assert_close(masked.out, after(name, state, key_mask=NONE, backend=backend).out, **ROUNDING)
        torch.testing.assert_close(masked.state.read(feature_map, query).out, wanted.out, **ROUNDING)


@pytest.mark.parametrize("name", STREAMS)
def test_what_outweighs_the_other_is_all_that_is_seen(name: str) -> None:
    state, value = stream(name), tokens(1, 1)[2]
    # One token alone gives its value: a product and a division in float32.
    torch.testing.assert_close(after(name, state.decay(-1e5)).out, value, rtol=1e-5, atol=1e-5)
    alone = after(name, state, key_mask=NONE).out
    torch.testing.assert_close(after(name, state.decay(1e5)).out, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["exponential", "linear", "grouped"])
def test_tokens_that_outweigh_a_state_keep_their_digits(name: str) -> None:
    found, fresh = (after(name, state, 9).out for state in (stream(name).decay(-1e5), None))
    # Exponents of at most some tens, rounded twice in float32.
    torch.testing.assert_close(found, fresh, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [-1e3, -1e4, -1e6, -1e8, -1e30])
@pytest.mark.parametrize("name", ["exponential", "linear", "grouped"])
def test_rows_that_see_a_faint_state_alone_keep_its_digits(name: str, factor: float) -> None:
    """Beside others that see a token: those before the call's keys, and masked ones before the first live one."""
    feature_map, _ = STREAMS[name]
    state, (query, key, value) = stream(name), tokens(2, 1)
    wanted = state.read(feature_map, query[:, :, :1]).out
    both = linattn.linear_attention_with_state(query, key[:, :, 1:], value[:, :, 1:], feature_map, state.decay(factor))
    mask = torch.tensor([[False, True]])
    masked = linattn.linear_attention_with_state(query, key, value, feature_map, state.decay(factor), key_mask=mask)
    for out in (both.out, masked.out):
        # Exponents of some thousands, which float32 has to 2⁻¹².
        torch.testing.assert_close(out[:, :, :1], wanted, rtol=2**-10, atol=2**-10)
        torch.testing.assert_close(out[:, :, 1:], value[:, :, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["exponential", "linear", "grouped"])
def test_a_state_with_a_factor_apart_enters_graphs_and_mapped_calls(name: str) -> None:
    feature_map, _ = STREAMS[name]
    state, given = stream(name).decay(-500.0), tokens(3, 1)

    def rows(bias: Tensor) -> Tensor:
        return linattn.linear_attention_with_state(*given, feature_map, state, key_bias=bias).out

    bias = torch.randn(2, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    wanted = torch.stack([rows(each) for each in bias])
    torch.testing.assert_close(torch.func.vmap(rows)(bias), wanted, **ROUNDING)
    compiled = torch.compile(rows, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(bias[0]), wanted[0], **ROUNDING)


@pytest.mark.parametrize("name", ["exponential", "linear", "grouped"])
def test_minus_infinity_leaves_the_empty_state(name: str) -> None:
    feature_map, _ = STREAMS[name]
    empty = State.empty(feature_map, batch_size=1, num_heads=2, value_dim=8)
    for state in (stream(name), stream(name).decay(1e7)):
        assert all(torch.equal(x, y) for x, y in zip(state.decay(-math.inf).sums, empty.sums, strict=True))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", STREAMS)
def test_a_factor_on_no_keys_is_none(name: str, factor: float) -> None:
    """Of a stream that padding alone has entered; in a batch, one row's, beside another that holds keys."""
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0] = False
    feature_map, window = STREAMS[name]
    given = tokens(5, 3, 2)
    state = linattn.linear_attention_with_state(*given, feature_map, key_mask=mask, window=window).state
    decayed = state.decay(torch.tensor([[factor], [0.0]]))
    later = tokens(9, 1, 2)
    bias = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(4))
    options = {"key_bias": bias, "window": window}
    found, wanted = (linattn.linear_attention_with_state(*later, feature_map, x, **options) for x in (decayed, state))
    torch.testing.assert_close(found.out, wanted.out, **ROUNDING)
    logs = (x.state.read(feature_map, later[0]).log_normalizer for x in (found, wanted))
    torch.testing.assert_close(*logs, **ROUNDING)


@pytest.mark.parametrize("name", STREAMS)
def test_factors_add_up(name: str) -> None:
    state, (feature_map, _) = stream(name), STREAMS[name]
    query = tokens(3, 2)[0]
    there = state.decay(1e7).decay(-1e7)
    torch.testing.assert_close(
        there.read(feature_map, query).log_normalizer, state.read(feature_map, query).log_normalizer, **ROUNDING
    )
    torch.testing.assert_close(after(name, there, 9).out, after(name, state, 9).out, **ROUNDING)
    gone = state.decay(1e7).decay(-math.inf)
    assert not gone.read(feature_map, query).out.any()


@pytest.mark.parametrize("name", ["exponential", "linear", "window"])
def test_heads_have_factors_of_their_own(name: str) -> None:
    factor = torch.tensor([[1e6, -1e6]])
    found = after(name, stream(name).decay(factor), 5).out
    for head, one in enumerate((1e6, -1e6)):
        wanted = after(name, stream(name).decay(one), 5).out
        torch.testing.assert_close(found[:, head], wanted[:, head], **ROUNDING)


@pytest.mark.parametrize("name", ["exponential", "linear"])
def test_states_with_factors_merge(name: str) -> None:
    feature_map, _ = STREAMS[name]
    first, second = stream(name), stream(name, 11)
    query = tokens(3, 2)[0]
    wanted = first.merge(second).read(feature_map, query)
    found = first.decay(1e6).merge(second.decay(1e6)).read(feature_map, query)
    torch.testing.assert_close(found.out, wanted.out, **ROUNDING)
    torch.testing.assert_close(found.log_normalizer, wanted.log_normalizer + 1e6, rtol=2**-23, atol=0)
    one = first.read(feature_map, query).out
    for pair in (first.merge(second.decay(-1e6)), second.decay(-1e6).merge(first)):
        torch.testing.assert_close(pair.read(feature_map, query).out, one, rtol=1e-6, atol=1e-6)


def test_absorbing_and_flushing_keep_a_factor() -> None:
    feature_map, _ = STREAMS["exponential"]
    state, query = stream("exponential"), tokens(3, 2)[0]
    key, value = tokens(4, 1)[1:]
    near, far = (x.absorb(feature_map, key, value, key_mask=NONE.expand(1, 4)) for x in (state, state.decay(1e7)))
    torch.testing.assert_close(far.read(feature_map, query).out, near.read(feature_map, query).out, **ROUNDING)
    state = stream("window")
    near, far = (x.flush(feature_map).read(feature_map, query) for x in (state, state.decay(-1e7)))
    torch.testing.assert_close(far.out, near.out, **ROUNDING)
    torch.testing.assert_close(far.log_normalizer, near.log_normalizer - 1e7, rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", ["exponential", "window"])
def test_gradients_of_a_large_factor_are_those_of_a_small_one(name: str) -> None:
    feature_map, _ = STREAMS[name]
    gradients = []
    for size in (0.5, 1e4):
        factor = torch.tensor([[size, -size]], requires_grad=True)
        part = stream(name).decay(factor).read(feature_map, tokens(3, 2)[0])
        (part.log_normalizer.sum() + part.out.sum()).backward()
        gradients.append(factor.grad)
    # d log Σ e^f w / df = 1 for each of three queries; the outputs do not depend on it.
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.full((1, 2), 3.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(1, 2), torch.zeros(2, 2).double(), torch.zeros(2).double(), 3.0], ids=str
)
@pytest.mark.parametrize("name", ["exponential", "window"])
def test_a_factor_of_another_kind_is_refused(name: str, wrong: object) -> None:
    feature_map, _ = STREAMS[name]
    state = dataclasses.replace(stream(name), apart=wrong)
    for use in (
        lambda: after(name, state),
        lambda: state.read(feature_map, tokens(1)[0]),
        lambda: state.decay(-1.0),
        lambda: state.select(torch.tensor([0])),
    ):
        with pytest.raises((ValueError, TypeError), match=r"the state's apart must be torch.float64 of shape \(1, 2\)"):
            use()


def test_rows_and_devices_carry_it_along() -> None:
    feature_map, _ = STREAMS["exponential"]
    state = linattn.linear_attention_with_state(*tokens(30, 0, 2), feature_map).state
    state = state.decay(torch.tensor([[1e6], [-1e6]]))
    query = tokens(3, 2)[0]
    for row in (0, 1):
        log = state.select(torch.tensor([row])).to("cpu").detach().read(feature_map, query).log_normalizer
        assert bool((log.sign() == (1 if row == 0 else -1)).all())


@pytest.mark.parametrize("factor", [1e6, 1e8, 1e30])
@pytest.mark.parametrize("name", ["exponential", "linear", "grouped"])
def test_no_keys_weigh_nothing_whatever_their_factor(name: str, factor: float) -> None:
    """A state of none stays the unit of merging."""
    held, (feature_map, _), query = stream(name), STREAMS[name], tokens(3, 2)[0]
    wanted = held.read(feature_map, query)
    for empty in (held.decay(-math.inf).decay(factor), held.decay(factor).decay(-math.inf)):
        for merged in (empty.merge(held), held.merge(empty)):
            torch.testing.assert_close(merged.read(feature_map, query).out, wanted.out, **ROUNDING)


@pytest.mark.parametrize("factor", [-7e-4, 3e-3])
@pytest.mark.parametrize("name", STREAMS)
def test_small_factors_add_up_over_thousands_of_tokens(name: str, factor: float) -> None:
    """As a gate's in a stream; rounded one by one they would be wrong by as many roundings of an exponent."""
    state, (feature_map, _) = stream(name), STREAMS[name]
    factor, query = torch.tensor(factor).item(), tokens(3, 2)[0]
    decayed = state
    for _ in range(2000):
        decayed = decayed.decay(factor)
    found, wanted = (x.read(feature_map, query) for x in (decayed, state))
    torch.testing.assert_close(found.log_normalizer, wanted.log_normalizer + 2000 * factor, **ROUNDING)
    once = state.decay(2000 * factor)
    torch.testing.assert_close(after(name, decayed, 9).out, after(name, once, 9).out, **ROUNDING)


@pytest.mark.parametrize("name", STREAMS)
def test_small_factors_add_up_in_graphs_too(name: str) -> None:
    """Of each token's own call, and inside one mapped call."""
    torch.compiler.reset()
    state, (feature_map, _) = stream(name).decay(-30.0), STREAMS[name]
    factor, query, number = 3.0001e-3, tokens(3, 2)[0], 1000
    compiled, decayed = torch.compile(lambda x: x.decay(factor), backend="eager", fullgraph=True), state
    for _ in range(number):
        decayed = compiled(decayed)

    def mapped(factor: Tensor) -> Tensor:
        inner = state
        for _ in range(number):
            inner = inner.decay(factor)
        return inner.read(feature_map, query).log_normalizer

    wanted = state.read(feature_map, query).log_normalizer + number * factor
    of_mapped = torch.func.vmap(mapped)(torch.full((2,), factor, dtype=torch.float64))
    for found in (decayed.read(feature_map, query).log_normalizer, *of_mapped):
        # Exponents of some thirty, rounded a few times in float32.
        torch.testing.assert_close(found, wanted, rtol=0, atol=2**-16)


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_left_of_large_factors_keeps_its_digits(name: str) -> None:
    """A number has more than float32 holds of a large one."""
    state, (feature_map, _) = stream(name), STREAMS[name]
    logs = [x.read(feature_map, tokens(3, 2)[0]).log_normalizer for x in (state, state.decay(4000.1).decay(-4000.0))]
    torch.testing.assert_close(logs[1], logs[0] + 0.1, **ROUNDING)


def test_a_fading_stream_is_the_whole_call() -> None:
    """Token by token, with rates that float32 does not hold, of which thousands of tokens add up."""
    feature_map, _ = STREAMS["exponential"]
    gate, length = FixedDecay.retnet(8), 3000
    gates = Gates(gate(torch.zeros(1, length, 1)).log_forget[:, 6:])
    query, key, value = tokens(length)
    exact = (x.double() for x in (query, key, value))
    wanted = gated_attention_with_state(*exact, feature_map, gates).out
    state, outs = None, []
    for place in range(length):
        at = slice(place, place + 1)
        token = query[:, :, at], key[:, :, at], value[:, :, at]
        out, state = gated_attention_with_state(*token, feature_map, gates.cut(at), state)
        outs.append(out)
    # Exponents of at most some tens, rounded a few times in float32, and sums of as many terms.
    torch.testing.assert_close(torch.cat(outs, 2).double(), wanted, rtol=1e-5, atol=1e-5)
