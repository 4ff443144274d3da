"""States of merged keys as they are read and chosen from, beside the laws of their streams."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import linattn
from grid import qkv
from linattn import MergedKV
from linattn.kv_cache.keys import MergedKeys
from linattn.nn import Stream


@pytest.mark.parametrize("bits", [None, 4])
def test_autocast_changes_no_reading_of_a_state(bits: int | None) -> None:
    query, key, value = qkv(num_queries=60, num_keys=60, dtype=torch.float32)
    state = linattn.merged_attention_with_state(query, key, value, MergedKV(4, 20, bits=bits), enable_gqa=True).state
    plain = [*state.read(query), *state.tokens()]
    with torch.autocast("cpu", torch.bfloat16):
        cast = [*state.read(query), *state.tokens()]
    assert all(torch.equal(x, y) for x, y in zip(plain, cast, strict=True))


@pytest.mark.parametrize("bits", [None, 4])
def test_values_of_no_width_are_a_legal_amount_in_any_dtype_and_bits(bits: int | None) -> None:
    for dtype in (torch.float32, torch.float64):
        tokens = qkv(num_queries=60, num_keys=60, value_dim=0, dtype=dtype)
        out, state = linattn.merged_attention_with_state(*tokens, MergedKV(4, 20, bits=bits), enable_gqa=True)
        assert out.shape == (*tokens[0].shape[:3], 0)
        assert state.read(tokens[0]).out.shape == out.shape


def test_rows_that_a_state_does_not_have_are_refused() -> None:
    """Grouped by their first tokens, or not; before a state is made that misses some."""
    tokens, mask = qkv(num_queries=30, num_keys=30), torch.ones(2, 30, dtype=torch.bool)
    for padding in (0, 5):
        mask[1, :padding] = False
        options = {"key_mask": mask, "enable_gqa": True}
        state = linattn.merged_attention_with_state(*tokens, MergedKV(4, 8, bits=None), **options).state
        stream = Stream(state, torch.full((2,), 30))
        for wrong in ([2, 0], [-1, 0]):
            for each in (state, stream):
                with pytest.raises(IndexError, match=rf"indices must lie in \[0, 2\), the rows, got {wrong[0]}"):
                    each.select(torch.tensor(wrong))
        for chosen in (torch.int16, torch.uint8):
            few = [state.select(torch.tensor([1], dtype=dtype)) for dtype in (chosen, torch.int64)]
            assert all(map(torch.equal, *(each.tokens() for each in few)))
            assert stream.select(torch.tensor([1], dtype=chosen)).num_tokens.tolist() == [30]
        with pytest.raises(TypeError, match="1-D integer tensor, got list"):
            state.select([0])
        with pytest.raises(TypeError, match=r"query must be a floating tensor, got torch\.int64"):
            state.read(tokens[0].long())


@pytest.mark.parametrize("num_sinks", [0, 2])
def test_a_stream_that_goes_on_in_a_wider_dtype_is_copied_and_read(num_sinks: int) -> None:
    """A file's or a copy's tensors are looked at before they are used."""
    config, (query, key, value) = MergedKV(2, 4, None, num_sinks), qkv(num_queries=12, num_keys=12, dtype=torch.float32)
    state = None
    for dtype, start, stop in ((torch.bfloat16, 0, 9), (torch.float32, 9, 10)):
        tokens = (x[:, :, start:stop].to(dtype) for x in (query, key, value))
        state = linattn.merged_attention_with_state(*tokens, config, state, enable_gqa=True).state
    twin, rest = copy.deepcopy(state), [x[:, :, 10:] for x in (query, key, value)]
    assert torch.equal(twin.read(query).out, state.read(query).out)
    outs = [linattn.merged_attention_with_state(*rest, config, x, enable_gqa=True).out for x in (state, twin)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("cuts", [(60,), (30, 30), (59, 1)], ids=str)
@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize(
    "config",
    [MergedKV(4, 6, bits=None), MergedKV(4, 16, bits=4), MergedKV(4, 16, 4, coded=((5, 6),)), MergedKV(1, 1)],
    ids=str,
)
def test_a_state_holds_no_memory_of_the_tokens_that_it_came_with(
    config: MergedKV, num_sinks: int, cuts: tuple[int, ...]
) -> None:
    """Nor do files of it: a view of no token, as of no sinks, would keep all keys and values of its call."""
    state, config = None, dataclasses.replace(config, num_sinks=num_sinks)
    for pieces in zip(*(x.split(cuts, 2) for x in qkv(num_queries=60, num_keys=60)), strict=True):
        state = linattn.merged_attention_with_state(*pieces, config, state, enable_gqa=True, backend="torch").state
        for x in pytree.tree_leaves(state):
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_a_state_of_no_heads_is_not_read() -> None:
    tokens = [x[:, :0] for x in qkv(num_queries=6, num_keys=6)]
    empty = linattn.MergedState(MergedKeys.empty(MergedKV(4, 8, bits=None), *tokens[1:]))
    with pytest.raises(ValueError, match="a multiple of 0 heads"):
        empty.read(tokens[0])
