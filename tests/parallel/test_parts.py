"""Parts of a sequence on several ranks give the rows, gradients and states of the whole on one."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from grid import MAPS, SOFTMAX_MAPS, build, takes_statistics_from_the_call
from linattn.feature_maps import EluPlusOne
from linattn.parallel.parts import Part
from linattn.positions import Gates
from ranks import SIZES
from split_calls import (
    LENGTHS,
    Whole,
    compiled_errors,
    distributed_errors,
    errors_of_calls,
    refusals_of_distributed,
    second_derivatives_told,
    state_errors,
)

pytestmark = pytest.mark.xdist_group("ranks")
# Rounding in float64 over some hundred additions; the grid's random maps have weights of very different sizes.
BOUND = 1e-12


def check(on_ranks, calls: list[Whole], which: int | None = None, sizes: tuple[int, ...] = SIZES) -> None:
    """All calls, on these numbers of ranks, with all layouts or one."""
    for size in sizes:
        layouts = LENGTHS[size] if which is None else LENGTHS[size][which % len(LENGTHS[size]) :][:1]
        for rank, every in enumerate(on_ranks(size, errors_of_calls, calls, layouts)):
            for (call, lengths), found in zip(product(calls, layouts), every, strict=True):
                bound = BOUND * torch.finfo(call.dtype).eps / torch.finfo(torch.float64).eps
                assert max(found.values()) <= bound, (size, lengths, rank, call, found)


def in_turn(number: int) -> tuple[int, ...]:
    """One of the numbers of ranks."""
    return SIZES[number % 3 :][:1]


ADDED = tuple(name for name in MAPS if not takes_statistics_from_the_call(name))
WINDOWED = tuple(name for name in ADDED if name in SOFTMAX_MAPS and build(name).positive_normalizer)


@pytest.mark.parametrize("number", range(len(ADDED)), ids=ADDED)
def test_every_map_in_both_directions_on_any_parts(on_ranks, number):
    """Each map on each number of ranks, and each kind of call of some maps on each."""
    name = ADDED[number]
    calls = [Whole(name), Whole(name, is_causal=False, weights="mask"), Whole(name, weights="bias")]
    for index, call in enumerate(calls):
        check(on_ranks, [call], number + index, SIZES[(number + index) % 3 :][:1])


BY_NAME = list(product(["FavorPlus", "Relu", "Expansion"], ["reference", "blocked"]))


@pytest.mark.parametrize("number", range(len(BY_NAME)), ids=lambda number: "-".join(BY_NAME[number]))
def test_named_backends_and_all_layouts(on_ranks, number):
    """Each direction on numbers of ranks that take turns."""
    name, backend = BY_NAME[number]
    for place, is_causal in enumerate((True, False)):
        check(
            on_ranks, [Whole(name, is_causal=is_causal, backend=backend)], sizes=in_turn(number + number // 3 + place)
        )


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("followed", ["key", "value", "key_bias", "no tokens"])
def test_ranks_without_keys_to_send_answer_gradients_that_others_wait_for(on_ranks, followed, backend):
    """Queries do not have to be followed for it, nor do tokens where the map's weights are."""
    name = "LearnedExponential" if followed == "no tokens" else "Relu"
    check(on_ranks, [Whole(name, weights="bias", backend=backend, followed=followed)], 1, SIZES[:2])


@pytest.mark.parametrize("number", range(len(WINDOWED)), ids=WINDOWED)
def test_windows(on_ranks, number):
    """Each map with one window on one number of ranks, and with another on another, which maps take in turns."""
    name = WINDOWED[number]
    check(on_ranks, [Whole(name, number % 2 == 0, window=4)], number, in_turn(number))
    check(on_ranks, [Whole(name, number % 2 == 1, "mask", window=2)], number + 1, in_turn(number + 1 + number // 3 % 2))


@pytest.mark.parametrize("is_causal", [True, False])
def test_windows_on_all_layouts(on_ranks, is_causal):
    check(on_ranks, [Whole("FavorPlus", is_causal, window=width) for width in (1, 32)])
    check(on_ranks, [Whole("FavorPlus", is_causal, "bias", window=4)])


GATED = list(product(["FavorPlus", "Expansion"], [None, 4], ["gates", "input gates"]))


@pytest.mark.parametrize("number", range(len(GATED)), ids=lambda number: "-".join(map(str, GATED[number])))
def test_gates_of_a_rank_make_what_came_before_fade(on_ranks, number):
    """Numbers of ranks take turns, so that each meets each map, window and kind of gate."""
    name, window, weights = GATED[number]
    check(on_ranks, [Whole(name, weights=weights, window=window)], sizes=in_turn(number))


NARROW = list(product(["FavorPlus", "Relu", "Expansion", "LearnedExponential"], ["reference", "blocked"]))


@pytest.mark.parametrize("number", range(len(NARROW)), ids=lambda number: "-".join(NARROW[number]))
def test_gates_of_a_rank_in_float32(on_ranks, number):
    """Gates' sums are in float64, whatever the tokens are in; each number of ranks meets both backends."""
    name, backend = NARROW[number]
    whole = Whole(name, weights="input gates", backend=backend, dtype=torch.float32)
    check(on_ranks, [whole], sizes=in_turn(number))


@pytest.mark.parametrize("weights", ["none", "mask", "bias", "gates", "input gates"])
@pytest.mark.parametrize("name", ["FavorPlus", "Relu"])
def test_every_rank_has_the_state_of_all(on_ranks, name, weights):
    for size in SIZES:
        for every in on_ranks(size, state_errors, name, weights, LENGTHS[size]):
            for lengths, found in zip(LENGTHS[size], every, strict=True):
                assert max(found.values()) <= BOUND, (size, lengths, found)


@pytest.mark.parametrize("window", [None, 4])
def test_a_compiled_call_is_one_graph(on_ranks, window):
    for found in on_ranks(2, compiled_errors, Whole("FavorPlus", window=window)):
        assert max(found.values()) <= BOUND, found


@pytest.mark.parametrize("call", [Whole("EluPlusOne", backend="reference"), Whole("FavorPlus", window=4)])
def test_second_derivatives_are_refused(on_ranks, call):
    """Each rank would have those of its own tokens alone."""
    for words in on_ranks(2, second_derivatives_told, call):
        assert "first derivatives only" in words


@pytest.mark.parametrize("dimension", ["batch", "heads"])
def test_tensors_that_know_their_ranks(on_ranks, dimension):
    """DTensors split over data or heads, and sequences split over another dimension of the mesh."""
    for found in on_ranks((2, 2), distributed_errors, dimension):
        assert found <= BOUND, found


def test_tensors_that_know_their_ranks_are_refused_where_nothing_is_split(on_ranks):
    for found in on_ranks(2, refusals_of_distributed):
        assert len(found) == 6
        assert all("got a DTensor; call through" in words for words in found.values()), found


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 2, 5), (1, 1, 6), (3, 2, 6)])
def test_gates_of_other_tokens_are_refused_before_anything_is_sent(shape: tuple[int, ...]) -> None:
    """They say where a rank's keys are cut: shorter ones would leave keys out."""
    tokens, gates = (torch.ones(2, 2, 6, 4),) * 3, Gates(torch.full(shape, -0.1))
    with pytest.raises(ValueError, match=r"gates are those of the keys, .* for keys of \(2, 2, 6\)"):
        Part.checked(tokens, EluPlusOne(4), (None, None), gates, is_causal=True, enable_gqa=False)


def test_gates_that_are_no_numbers_are_refused_before_anything_is_sent() -> None:
    """But at masked tokens, whose gates count for nothing: one rank would wait for the other else."""
    tokens, gates, mask = (torch.ones(2, 2, 6, 4),) * 3, torch.full((2, 2, 6), -9.0), torch.ones(2, 6, dtype=torch.bool)
    gates[0, 1, 3] = torch.nan
    with pytest.raises(ValueError, match="log_forget must be numbers below infinity"):
        Part.checked(tokens, EluPlusOne(4), (None, None), Gates(gates), is_causal=True, enable_gqa=False)
    mask[0, 3] = False
    part = Part.checked(tokens, EluPlusOne(4), (mask, None), Gates(gates), is_causal=True, enable_gqa=False)
    assert part.gates.log_forget.tolist()[0] == [[-9.0, -9.0, -9.0, 0.0, -9.0, -9.0]] * 2
