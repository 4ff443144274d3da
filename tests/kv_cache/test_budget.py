"""Bytes that a configuration promises are those that its stream holds."""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from linattn import MergedKV, merged_attention_with_state
from linattn.kv_cache.budget import RECALLS, Sizes, frame_bytes, kept_bytes, within_budget
from linattn.kv_cache.query_sample import sample_size

L, D, DV, HEADS, GROUPS = 60, 8, 6, 1, 3


def tokens(dtype):
    draw = torch.Generator().manual_seed(5)
    shapes = ((HEADS * GROUPS, D), (HEADS, D), (HEADS, DV))
    return [torch.randn(1, heads, L, width, generator=draw, dtype=torch.float64).to(dtype) for heads, width in shapes]


def held_bytes(state):
    return sum(x.nbytes for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("config", [MergedKV(6, 8, None), MergedKV(6, 20, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_stream_of_whole_blocks_holds_what_is_promised(config, dtype):
    """Of narrow tokens the window alone is narrow."""
    state = merged_attention_with_state(*tokens(dtype), config, enable_gqa=True).state
    sizes = Sizes(D, DV, dtype.itemsize, GROUPS)
    # 60 tokens are ten whole blocks: two are held.
    assert held_bytes(state) == kept_bytes(config, sizes, L)


@pytest.mark.parametrize("config", [MergedKV(6, 32, None), MergedKV(6, 40, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_stream_never_holds_more_than_is_promised(config, dtype):
    """At every token, while memory fills too, when narrow tokens leave the window for wider merged keys."""
    sizes, state, least = Sizes(D, DV, dtype.itemsize, GROUPS), None, []
    for t in range(L):
        token = (x[:, :, t : t + 1] for x in tokens(dtype))
        state = merged_attention_with_state(*token, config, state, enable_gqa=True).state
        least.append(kept_bytes(config, sizes, t + 1) - held_bytes(state))
    assert min(least[16:]) == 0
    assert min(least) >= 0


@pytest.mark.parametrize("recall", RECALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_budget_is_not_exceeded_while_memory_fills(dtype, recall):
    """When most tokens are about to be quantized."""
    for budget in (128, 512):
        sizes = Sizes(64, 64, dtype.itemsize)
        config = within_budget(budget, sizes, recall=recall)
        assert max(kept_bytes(config, sizes, t) for t in range(0, 20 * budget, 29)) <= budget * sizes.key_bytes


def test_merged_keys_in_few_bits_are_exact_while_they_are_few():
    """Up to as many as the codes' bytes hold, 12 of 96 in 4 bits, the bytes are those of exact keys."""
    sizes, few, exact = Sizes(32, 32), MergedKV(4, 96, 4), MergedKV(4, 96, None)
    for num_tokens in (3, 8, 24):
        assert kept_bytes(few, sizes, num_tokens) == kept_bytes(exact, sizes, num_tokens)
    assert kept_bytes(few, sizes, 25) < kept_bytes(exact, sizes, 25)


@pytest.mark.parametrize("sizes", [Sizes(64, 64), Sizes(256, 256, 2, 4)])
def test_each_recall_holds_more_tokens_one_by_one_than_the_one_before(sizes):
    num_compared = 0
    for budget in range(8, 600, 7):
        configs = []
        # Below these there is no room beside the sampled queries; then little for frames of three numbers of bits.
        with suppress(ValueError):
            configs = [within_budget(budget, sizes, recall=recall) for recall in RECALLS]
        if configs and all(len(config.coded) == 2 for config in configs):
            near, middle, far = (config.blocks.window + sum(n for n, _ in config.coded) for config in configs)
            assert budget < 42 or far > middle > near
            assert budget < 256 or far > 1.5 * middle > 1.5 * 1.5 * near
            num_compared += 1
    assert num_compared > 60


@pytest.mark.parametrize("bits", [2, 4, 8, None])
@pytest.mark.parametrize("sizes", [Sizes(64, 64), Sizes(32, 16, 2, 4), Sizes(256, 256, 2, 8)])
def test_a_budget_that_is_too_small_names_the_least_that_is_not(sizes, bits):
    with pytest.raises(ValueError, match=r"give a budget of \d+ or more") as error:
        within_budget(1, sizes, bits)
    least = int(re.search(r"(\d+) or more", str(error.value))[1])
    assert within_budget(least, sizes, bits).num_merged > 0
    with pytest.raises(ValueError, match=f"give a budget of {least} or more"):
        within_budget(least - 1, sizes, bits)


def test_a_larger_budget_than_one_that_fits_fits():
    """Sinks, of which there are more from some budgets on, leave room for the rest."""
    for sizes in (Sizes(4, 16, 2, 2), Sizes(16, 16, 2, 4), Sizes(64, 64)):
        for bits in (2, 4, 7.5, 8, None):
            least = next(budget for budget in range(1, 99) if is_within(budget, sizes, bits))
            assert all(is_within(budget, sizes, bits) for budget in range(least, 99))


def is_within(budget, sizes, bits):
    """Whether merged keys have room."""
    with suppress(ValueError):
        return within_budget(budget, sizes, bits).num_merged > 0
    return False


@pytest.mark.parametrize("wrong", [0, -64, "64", 64.0, None, True, np.int64(64)], ids=repr)
@pytest.mark.parametrize("name", ["head_dim", "num_groups"])
def test_widths_of_no_head_are_refused(name, wrong):
    with pytest.raises(
        ValueError, match=r"head_dim and num_groups must be positive integers, value_dim an integer ≥ 0"
    ):
        MergedKV.within(512, **{"head_dim": 64, name: wrong})


@pytest.mark.parametrize("wrong", ["float16", None, 4, torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_of_no_keys_are_refused(wrong):
    with pytest.raises(
        TypeError, match=r"dtype must be a float of 16 bits or more, got .*; give that of the model's keys"
    ):
        MergedKV.within(512, head_dim=64, dtype=wrong)


@pytest.mark.parametrize("recall", RECALLS)
@pytest.mark.parametrize("budget", [128, 256, 512, 1024])
def test_blocks_are_of_8_tokens_and_more(recall, budget):
    """Prefill goes block by block: on Gemma 3 270M blocks of 4 took twice the time of blocks of 8."""
    assert within_budget(budget, Sizes(256, 256, 4, 4), recall=recall).blocks.size >= 8


def test_bytes_and_budgets_by_hand():
    assert Sizes(256, 256).key_bytes == 2048
    # Means and deviations in float32, an order in 16 bits, and bits of 8 blocks.
    assert frame_bytes(256, 4) == 2568
    assert [sample_size(groups) for groups in (4, 32)] == [16, 64]
    assert within_budget(512, Sizes(64, 64), bits=None).label == "sinks 4 + window 196 + merged 251"
