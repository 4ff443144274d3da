"""Counts of numbers and operations, against the tensors and products themselves."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from linattn import MergedKV
from linattn.attention import State
from linattn.kv_cache import merged_attention_with_state
from linattn.methods.measures import exact_state_numbers
from linattn.methods.method import Method, parse_method
from linattn_lab.built_methods import BuiltMethod, build
from linattn_lab.costs import exact_flops_per_token, flops_per_token, spread, state_numbers

D, DV = 5, 3
NUM_FEATURES = {
    "Expansion(num_centres=4)": None,
    "Expansion(num_centres=2, order=2)": None,
    "FavorPlus": 8,
    "Relu": None,
}


def written_method(text: str, num_features: int | None = None, head_dim: int = D) -> BuiltMethod:
    """A written method for heads of a width."""
    return build(parse_method(text), head_dim, num_features=num_features, scale=head_dim**-0.5, seed=0)


def merging(config: MergedKV, head_dim: int = D) -> BuiltMethod:
    """Merged keys for heads of a width."""
    return build(Method(None, merged=config), head_dim, num_features=None, scale=head_dim**-0.5, seed=0)


def products(*shapes):
    """Two operations for every entry multiplied: (rows, inner, columns) of each matrix product."""
    return sum(2 * rows * inner * columns for rows, inner, columns in shapes)


@pytest.mark.parametrize("written", NUM_FEATURES)
def test_state_numbers_are_those_of_a_state(written):
    built = written_method(written, NUM_FEATURES[written])
    state = State.empty(built.feature_map, batch_size=1, num_heads=1, value_dim=DV)
    assert state_numbers(built, value_dim=DV) == sum(x.numel() for x in tree_leaves(state))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_keeps_and_multiplies_its_tokens(is_causal):
    window = 4
    beside, plain = written_method(f"FavorPlus + window {window}", 8), written_method("FavorPlus", 8)
    tokens = torch.zeros(2 * window, D + DV)
    assert state_numbers(beside, value_dim=DV) - state_numbers(plain, value_dim=DV) == tokens.numel()
    blocks, folds = (2, 1) if is_causal else (3, 2)
    seen = torch.arange(100)[: blocks * window]
    with_it, alone = (flops_per_token(x, value_dim=DV, is_causal=is_causal) for x in (beside, plain))
    assert with_it - folds * alone == sum(2 * D + 2 * DV for _ in seen)


def test_what_merged_keys_cost_beside_being_seen():
    """A block's distances, what a sample attends to before and after, and sums; or a sample and the nearest cluster."""
    window, merged = 4, 6
    written = f"window {window} + merged {merged}"
    causal, both = (flops_per_token(written_method(written), value_dim=DV, is_causal=x) for x in (True, False))
    pool, sample = window + merged, 16
    block = products((pool, D + DV, pool), (sample, D, pool), (sample, D, pool), (pool, 1, D + DV)) // window
    assert causal == (2 * window + merged) * (2 * D + 2 * DV) + block
    few, whole = (
        flops_per_token(written_method(x, head_dim=8), value_dim=6, is_causal=True)
        for x in (f"{written} in 4 bits", written)
    )
    # Blocks of eight, six numbers filled up to them: a row and its output, a token as it leaves; at a merge all merged.
    assert few - whole == products((2 * 2, 8, 8)) + products((2 * merged, 8, 8)) // window
    many, fewer = (
        flops_per_token(merging(MergedKV(1, number, None)), value_dim=DV, is_causal=True) for number in (800, 400)
    )
    # Without free places it would be four times as dear.
    assert many < 2.1 * fewer
    # Three blocks of 64 before the current one.
    wide = flops_per_token(merging(MergedKV(192, 6, None, 0)), value_dim=DV, is_causal=True)
    pool = 64 + merged
    block = products((pool, D + DV, pool), (sample, D, pool), (sample, D, pool), (pool, 1, D + DV)) // 64
    assert wide == (256 + merged) * (2 * D + 2 * DV) + block
    # Along as many axes as there are coordinates, these being few.
    token = products((64, D, 1), (D + DV, D + DV, 1), (merged, D + DV, 1), (1, 1, D + DV))
    wide = flops_per_token(merging(MergedKV(None, 6, None), 64), value_dim=64, is_causal=False)
    assert wide == products((6, 128, 1)) + products((64, 64, 1), (128, 16, 1), (6, 16, 1), (1, 1, 128))
    assert both == (3 * window + merged) * (2 * D + 2 * DV) + token


@pytest.mark.parametrize("config", [MergedKV(4, 6, None), MergedKV(192, 6, None)], ids=lambda config: config.label)
@pytest.mark.parametrize("is_causal", [False, True])
def test_merged_keys_are_kept_with_their_biases(config, is_causal):
    """And a stream's with the queries it sampled, as the stream itself has them."""
    # The latest block is full.
    tokens = (torch.randn(1, 1, 640, width) for width in (D, D, DV))
    keys = merged_attention_with_state(*tokens, config).state.keys
    kept = sum(x.numel() for x in keys.merged) + sum(x.numel() for x in keys.recent[:2])
    if is_causal:
        kept += keys.sample.query.numel() + sum(x.numel() for x in keys.sinks[:2])
    assert state_numbers(merging(config), value_dim=DV, is_causal=is_causal) == kept


def test_merged_keys_in_few_bits_are_counted_in_numbers_of_four_bytes():
    """Against a stream's tensors: what it keeps less its biases of near keys and which queries are there."""
    q, k, v = (torch.randn(1, 1, 48, width) for width in (D, D, DV))
    config = MergedKV(4, 12, 4)
    keys = merged_attention_with_state(q, k, v, config).state.keys
    held = sum(x.nbytes for x in tree_leaves(keys))
    beside = keys.recent.bias.nbytes + keys.sinks.bias.nbytes + keys.sample.there.nbytes
    assert state_numbers(merging(config), value_dim=DV) == -(-(held - beside) // 4)


def test_flops_are_those_of_the_products():
    groups, local = 4, 1 + D
    absorbing = [(local, 1, DV + 1)] * groups
    count = products((groups, D, 1), *absorbing, (1, local, DV + 1))
    assert flops_per_token(written_method("Expansion(num_centres=4)"), value_dim=DV, is_causal=True) == count
    count = products((1, D, 8), (1, D, 8), (8, 1, DV + 1), (1, 8, DV + 1))
    assert flops_per_token(written_method("FavorPlus", 8), value_dim=DV, is_causal=False) == count


def test_exact_attention_keeps_every_token_and_sees_every_visible_one():
    length = 7
    keys = torch.zeros(length, D + DV)
    assert exact_state_numbers(length, head_dim=D, value_dim=DV) == keys.numel()
    for is_causal in (False, True):
        visible = torch.ones(length, length).tril() if is_causal else torch.ones(length, length)
        mean = 2 * (D + DV) * float(visible.sum()) / length
        assert exact_flops_per_token(length, head_dim=D, value_dim=DV, is_causal=is_causal) == mean


def test_spread():
    assert spread([9.0, 1.0, 2.0, 4.0]) == {"median": 3.0, "min": 1.0, "max": 9.0}
