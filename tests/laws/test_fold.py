"""One fold, bracketed anyhow: prefill, chunks, single steps, merges."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import linattn
from damaged_states import read_again
from grid import BACKENDS, CAUSAL_MAPS, Case, build, cases_in_turns, qkv, sums, total

FOLD_CASES = tuple(Case(name, backend, True) for name in CAUSAL_MAPS for backend in BACKENDS)
LENGTH = 70


def in_pieces(case: Case, cuts: list[int], **options: object):
    """The whole sequence attended piece by piece."""
    feature_map, state, outs = case.build(), None, []
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH)
    bounds = [0, *cuts, LENGTH]
    for start, stop in itertools.pairwise(bounds):
        piece = (x[:, :, start:stop] for x in (query, key, value))
        out, state = linattn.linear_attention_with_state(
            *piece, feature_map, state, enable_gqa=True, backend=case.backend, **options
        )
        outs.append(out)
    return torch.cat(outs, 2), state


def tolerance(case: Case) -> float:
    """Rounding; signed maps lose digits where their normaliser crosses 0."""
    return 1e-12 if build(case.map_name).nonnegative else 1e-8


@pytest.mark.parametrize(("case", "size"), cases_in_turns(CAUSAL_MAPS, [1, 7, 64, LENGTH], directions=[True]), ids=str)
def test_any_cut_gives_the_same(case: Case, size: int, blocks_of) -> None:
    blocks_of(size)
    whole, last = in_pieces(case, [])
    cuts = sorted({0, 1, size - 1, size, min(size + 1, LENGTH), LENGTH})
    pieces, state = in_pieces(case, cuts)
    torch.testing.assert_close(pieces, whole, rtol=tolerance(case), atol=tolerance(case))
    ours, theirs = total(state), total(last)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", FOLD_CASES, ids=str)
def test_single_steps_give_the_same(case: Case) -> None:
    whole, _ = in_pieces(case, [])
    steps, _ = in_pieces(case, list(range(1, LENGTH)))
    torch.testing.assert_close(steps, whole, rtol=tolerance(case), atol=tolerance(case))


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_merge_is_a_monoid_over_absorb(name: str, blocks_of) -> None:
    blocks_of(5)
    feature_map = build(name)
    _, key, value = qkv(num_keys=30, scale=2.0)
    empty = linattn.State.empty(feature_map, batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
    a, b, c = (
        empty.absorb(feature_map, key[:, :, s], value[:, :, s]) for s in (slice(0, 4), slice(4, 17), slice(17, 30))
    )
    whole = empty.absorb(feature_map, key, value)

    def same(x: linattn.State, y: linattn.State) -> None:
        scale = torch.maximum(x.m, y.m)
        left, right = total(x, scale), total(y, scale)
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)

    same(a.merge(b).merge(c), a.merge(b.merge(c)))
    same(a.merge(empty), a)
    same(empty.merge(a), a)
    same(empty.merge(empty), empty)
    same(a.merge(b).merge(c), whole)
    same(b.merge(a).merge(c), whole)


@pytest.mark.parametrize("case", FOLD_CASES, ids=str)
def test_a_state_is_a_value(case: Case) -> None:
    """Stepping twice from one state gives the same; neither the state nor the inputs are written."""
    feature_map = case.build()
    first = qkv(num_queries=9, num_keys=9)
    second = qkv(num_queries=6, num_keys=6, seed=7)
    kept = [x.clone() for x in (*first, *second)]
    options = {"enable_gqa": True, "backend": case.backend}
    state = linattn.linear_attention_with_state(*first, feature_map, **options).state.detach()
    frozen = copy.deepcopy(state)
    once = linattn.linear_attention_with_state(*second, feature_map, state, **options)
    twice = linattn.linear_attention_with_state(*second, feature_map, state, **options)
    assert torch.equal(once.out, twice.out)
    assert torch.equal(sums(once.state), sums(twice.state))
    assert torch.equal(sums(state), sums(frozen))
    assert torch.equal(state.m, frozen.m)
    for x, before in zip((*first, *second), kept, strict=True):
        assert torch.equal(x, before)
    with pytest.raises(AttributeError):
        state.S = state.S


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_select_picks_rows(name: str) -> None:
    feature_map = build(name)
    q, k, v = qkv(batch=3, num_queries=9, num_keys=9)
    state = linattn.linear_attention_with_state(q, k, v, feature_map, enable_gqa=True).state
    rows = torch.tensor([2, 0, 0, 1])
    read = state.select(rows).read(feature_map, q[rows]).out
    torch.testing.assert_close(read, state.read(feature_map, q).out[rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["FavorPlus", "Hyperbolic", "Trigonometric", "Oprf", "Sderf", "RandomRelu"])
def test_a_state_refuses_another_draw_and_knows_its_own_again(name: str) -> None:
    feature_map = build(name)
    q, k, v = qkv(num_queries=5, num_keys=5)
    state = linattn.linear_attention_with_state(q, k, v, feature_map, enable_gqa=True).state
    out = state.read(feature_map, q).out
    again = build(name)
    again.redraw(12)
    again.load_state_dict(feature_map.state_dict())
    assert torch.equal(state.read(again, q).out, out)
    assert torch.equal(state.read(copy.deepcopy(feature_map), q).out, out)
    feature_map.redraw(1)
    for refused in (
        lambda: state.read(feature_map, q),
        lambda: state.absorb(feature_map, k, v),
        lambda: linattn.linear_attention_with_state(q, k, v, feature_map, state, enable_gqa=True),
    ):
        with pytest.raises(ValueError, match=r"built with .*seed=0.*seed=1"):
            refused()


def test_a_state_refuses_another_projection_under_the_same_seed() -> None:
    feature_map = build("FavorPlus")
    other = build("FavorPlus")
    other.load_state_dict({**feature_map.state_dict(), "projection": 2 * feature_map.projection})
    assert repr(other) == repr(feature_map)
    state = linattn.linear_attention_with_state(*qkv(), feature_map, enable_gqa=True).state
    with pytest.raises(ValueError, match="features of different maps, draws or weights do not mix"):
        state.read(other, qkv()[0])
    wrapped = [linattn.feature_maps.Centred(x).fit(*qkv(heads=2)[:2]).fingerprint() for x in (feature_map, other)]
    assert wrapped[0] != wrapped[1]


@pytest.mark.parametrize("window", [None, 4], ids=str)
def test_a_state_is_saved_and_loaded(window: int | None) -> None:
    """With torch's safe loader; its repr is one line."""
    feature_map = build("FavorPlus")
    options = {"enable_gqa": True, "window": window}
    state = linattn.linear_attention_with_state(*qkv(), feature_map, **options).state
    loaded = read_again({"state": state})["state"]
    outs = [linattn.linear_attention_with_state(*qkv(seed=5), feature_map, s, **options).out for s in (state, loaded)]
    assert torch.equal(*outs)
    assert "\n" not in repr(loaded)
    assert repr(loaded).startswith("State(batch=2, heads=2, features=12, value_dim=5")
    assert len(repr(loaded)) < 300


def test_states_of_different_maps_do_not_merge() -> None:
    _, key, value = qkv(num_keys=4)
    states = []
    for name in ("EluPlusOne", "Relu"):
        empty = linattn.State.empty(build(name), batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
        states.append(empty.absorb(build(name), key, value))
    with pytest.raises(ValueError, match="different maps"):
        states[0].merge(states[1])


def test_a_redraw_before_backward_is_refused() -> None:
    """Features are recomputed in the backward pass: under another draw its gradients would be silently wrong."""
    feature_map = build("FavorPlus")
    q, k, v = (x.requires_grad_() for x in qkv())
    for is_causal in (False, True):
        out = linattn.linear_attention(q, k, v, feature_map, is_causal=is_causal, enable_gqa=True)
        feature_map.redraw(5 + is_causal)
        with pytest.raises(RuntimeError, match=r"seed=.* in the forward pass .*redraw or fit after backward"):
            out.sum().backward()


def test_evaluation_never_draws() -> None:
    """Two calls, training or not, see the same features, and the global generators are left alone."""
    feature_map = build("FavorPlus")
    q, k, v = qkv()
    for mode in (True, False):
        feature_map.train(mode)
        before = torch.get_rng_state()
        first = linattn.linear_attention(q, k, v, feature_map, enable_gqa=True)
        second = linattn.linear_attention(q, k, v, feature_map, enable_gqa=True)
        assert torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), before)
