"""Counts of numbers and operations, against the tensors and products themselves."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from linattn.attention import Exact, State, linear_attention_with_state
from linattn.feature_maps import Expansion, FavorPlus, Relu
from linattn.planning.costs import exact_flops_per_token, exact_state_numbers, flops_per_token, state_numbers
from linattn.planning.methods import Method, parse_method
from linattn.planning.no_map import NoMap

D, DV = 5, 3
MAPS = {
    "Expansion": Expansion(D, 4, order=1),
    "Expansion(order=2)": Expansion(D, 2, order=2),
    "FavorPlus": FavorPlus(D, 8),
    "Relu": Relu(D),
}


@pytest.mark.parametrize("name", MAPS)
def test_state_numbers_are_those_of_a_state(name):
    state = State.empty(MAPS[name], batch_size=1, num_heads=1, value_dim=DV)
    kept = sum(x.numel() for x in (state.S, state.z, state.m))
    assert state_numbers(parse_method(name), MAPS[name], value_dim=DV) == kept


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_exact_part_keeps_and_multiplies_its_tokens(is_causal):
    window, heavy = 4, 3
    method, plain = parse_method(f"FavorPlus + window {window} + heavy {heavy}"), parse_method("FavorPlus")
    feature_map = MAPS["FavorPlus"]
    tokens = torch.zeros(2 * window + heavy, D + DV)
    more = state_numbers(method, feature_map, value_dim=DV) - state_numbers(plain, feature_map, value_dim=DV)
    assert more == tokens.numel()
    blocks, folds = (2, 1) if is_causal else (3, 2)
    seen = torch.arange(100)[: blocks * window + heavy]
    with_it, alone = (flops_per_token(x, feature_map, value_dim=DV, is_causal=is_causal) for x in (method, plain))
    # The keys' features twice and the queries' once, each against one vector.
    masses = 0 if is_causal else products(*[(1, D, 8), (8, 1, 1)] * 3)
    assert with_it - folds * alone - masses == sum(2 * D + 2 * DV for _ in seen)


@pytest.mark.parametrize("is_causal", [False, True])
def test_merged_keys_are_kept_and_seen_and_leave_nothing_to_fold(is_causal):
    cost = Exact(4, num_merged=6).cost(is_causal=is_causal)
    assert cost == (2 * 4 + 6, (2 if is_causal else 3) * 4 + 6, 0, False)
    # Three blocks of 64 before the current one.
    assert Exact(192, num_merged=6).cost(is_causal=True)[:2] == (256 + 6, 256 + 6)


def test_what_merged_keys_cost_beside_being_seen():
    """A block's distances, what a sample attends to before and after, and sums; or a sample and the nearest cluster."""
    window, merged = 4, 6
    method, nothing = parse_method(f"window {window} + merged {merged}"), NoMap(D)
    causal, both = (flops_per_token(method, nothing, value_dim=DV, is_causal=x) for x in (True, False))
    pool, sample = window + merged, 16
    block = products((pool, D + DV, pool), (sample, D, pool), (sample, D, pool), (pool, 1, D + DV)) // window
    assert causal == (2 * window + merged) * (2 * D + 2 * DV) + block
    few = flops_per_token(parse_method(f"{method.label} in 4 bits"), NoMap(8), value_dim=6, is_causal=True)
    whole = flops_per_token(method, NoMap(8), value_dim=6, is_causal=True)
    # Pieces of eight, and three of two: a row, a block to be kept and two to be read; at a merge all, out and in again.
    assert (
        few - whole
        == products((2 + 2, 8, 8), (3 * (2 + 2), 2, 2)) + products((2 * merged, 8, 8), (6 * merged, 2, 2)) // window
    )
    many, fewer = (
        flops_per_token(Method(None, Exact(1, num_merged=number)), nothing, value_dim=DV, is_causal=True)
        for number in (800, 400)
    )
    # Without free places it would be four times as dear.
    assert many < 2.1 * fewer
    # Along as many axes as there are coordinates, these being few.
    token = products((64, D, 1), (D + DV, D + DV, 1), (merged, D + DV, 1), (1, 1, D + DV))
    wide = flops_per_token(Method(None, Exact(num_merged=6)), NoMap(64), value_dim=64, is_causal=False)
    assert wide == products((6, 128, 1)) + products((64, 64, 1), (128, 16, 1), (6, 16, 1), (1, 1, 128))
    assert both == (3 * window + merged) * (2 * D + 2 * DV) + token


@pytest.mark.parametrize("is_causal", [False, True])
def test_merged_keys_are_kept_with_their_biases(is_causal):
    """And a stream's with the queries it sampled, as the stream itself has them."""
    tokens = (torch.randn(1, 1, 40, D), torch.randn(1, 1, 40, D), torch.randn(1, 1, 40, DV))
    method = parse_method("window 4 + merged 6")
    state = linear_attention_with_state(*tokens, None, exact=method.exact).state.exact
    kept = sum(x.numel() for x in state.merged) + sum(x.numel() for x in state.recent[:2])
    kept += state.sample.query.numel() if is_causal else 0
    assert state_numbers(method, NoMap(D), value_dim=DV, is_causal=is_causal) == kept


def test_the_masses_of_an_expansion_s_keys_are_counted():
    heavy, plain = (parse_method(name) for name in ("Expansion + heavy 3", "Expansion"))
    expansion, groups, local = MAPS["Expansion"], 4, 1 + D
    with_it, alone = (flops_per_token(x, expansion, value_dim=DV, is_causal=False) for x in (heavy, plain))
    masses = products(*[(groups, D, 1), (groups, local, 1)] * 2, (1, local, 1))
    assert with_it - alone == masses + 3 * (2 * D + 2 * DV)


def products(*shapes):
    """Two operations for every entry multiplied: (rows, inner, columns) of each matrix product."""
    return sum(2 * rows * inner * columns for rows, inner, columns in shapes)


def test_flops_are_those_of_the_products():
    expansion = MAPS["Expansion"]
    groups, local = 4, 1 + D
    absorbing = [(local, 1, DV + 1)] * groups
    count = products((groups, D, 1), *absorbing, (1, local, DV + 1))
    assert flops_per_token(parse_method("Expansion"), expansion, value_dim=DV, is_causal=True) == count
    favor = MAPS["FavorPlus"]
    count = products((1, D, 8), (1, D, 8), (8, 1, DV + 1), (1, 8, DV + 1))
    assert flops_per_token(parse_method("FavorPlus"), favor, value_dim=DV, is_causal=False) == count


def test_exact_attention_keeps_every_token_and_sees_every_visible_one():
    length = 7
    keys = torch.zeros(length, D + DV)
    assert exact_state_numbers(length, head_dim=D, value_dim=DV) == keys.numel()
    for is_causal in (False, True):
        visible = torch.ones(length, length).tril() if is_causal else torch.ones(length, length)
        mean = 2 * (D + DV) * float(visible.sum()) / length
        assert exact_flops_per_token(length, head_dim=D, value_dim=DV, is_causal=is_causal) == mean


def test_merged_keys_in_few_bits_are_counted_in_numbers_of_four_bytes():
    """Against the tensors of a stream's state: what it keeps less its biases of near keys and the state's exponent."""
    q, k, v = (torch.randn(1, 1, 48, width) for width in (D, D, DV))
    exact = Exact(4, num_merged=12, bits=4)
    state = linear_attention_with_state(q, k, v, None, exact=exact).state
    held = sum(x.nbytes for x in tree_leaves(state)) - state.m.nbytes
    beside = state.exact.recent.bias.nbytes + state.exact.sample.there.nbytes
    assert state_numbers(parse_method(exact.label), NoMap(D), value_dim=DV) == -(-(held - beside) // 4)
