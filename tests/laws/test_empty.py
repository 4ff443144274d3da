"""Nothing is a legal amount: no batch rows, no tokens, no value columns, forward, backward and in streams."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import MAPS, SOFTMAX_MAPS, Case, build, cases_in_turns, qkv, takes_statistics_from_the_call

SIZES = ({"batch": 0}, {"num_queries": 0, "num_keys": 0}, {"value_dim": 0}, {"num_keys": 0}, {"num_queries": 0})
# Maps that take a window, of each kind of fold.
WINDOW_MAPS = ("FavorPlus", "Expansion", "Expansion-0", "Expansion-call", "Centred-Balanced-FavorPlus")
WINDOWS = (4, 1)


def check(case: Case, sizes: dict[str, int], **options: object) -> None:
    """Shapes, and gradients that are there; rows without keys are 0."""
    leaves = [x.requires_grad_() for x in qkv(**sizes)]
    out = case.attend(*leaves, case.build(), **options)
    assert out.shape == (*leaves[0].shape[:3], leaves[2].shape[-1])
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape
        assert grad.isfinite().all()
    if leaves[1].shape[2] == 0:
        assert (out == 0).all()


@pytest.mark.parametrize(("case", "sizes"), cases_in_turns(MAPS, SIZES), ids=str)
def test_empty_inputs(case: Case, sizes: dict[str, int]) -> None:
    check(case, sizes)


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", WINDOW_MAPS)
def test_empty_inputs_beside_a_window(map_name: str, is_causal: bool, window: int, sizes: dict[str, int]) -> None:
    if is_causal and takes_statistics_from_the_call(map_name):
        with pytest.raises(ValueError, match="leak the future"):
            check(Case(map_name, "blocked", True), sizes, window=window)
        return
    check(Case(map_name, "blocked", is_causal), sizes, window=window)


@pytest.mark.parametrize("window", [None, *WINDOWS], ids=str)
@pytest.mark.parametrize("map_name", [n for n in WINDOW_MAPS if not takes_statistics_from_the_call(n)])
def test_empty_chunks_of_a_stream_change_nothing(map_name: str, window: int | None) -> None:
    assert map_name in SOFTMAX_MAPS
    options = {"enable_gqa": True, "window": window}
    feature_map = build(map_name)
    query, key, value = qkv(num_queries=13, num_keys=13)
    whole = linattn.linear_attention(query, key, value, feature_map, is_causal=True, **options)
    for cuts in ((0, 0, 1, 1, 2, 3, 8, 8, 13, 13), range(14)):
        state, outs = None, []
        for start, stop in zip(cuts, (*cuts[1:], 13), strict=True):
            chunk = (x[:, :, start:stop] for x in (query, key, value))
            out, state = linattn.linear_attention_with_state(*chunk, feature_map, state, **options)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES[:1] + SIZES[2:3], ids=str)
@pytest.mark.parametrize("map_name", [name for name in SOFTMAX_MAPS if not takes_statistics_from_the_call(name)])
def test_single_tokens_of_a_stream_of_nothing(map_name: str, sizes: dict[str, int]) -> None:
    """No batch rows and no value columns, by the way of a step, which no gradient follows."""
    feature_map, state = build(map_name), None
    with torch.no_grad():
        query, key, value = qkv(num_queries=3, num_keys=3, **sizes)
        for place in range(3):
            token = (x[:, :, place : place + 1] for x in (query, key, value))
            out, state = linattn.linear_attention_with_state(*token, feature_map, state, enable_gqa=True)
            assert out.shape == (*query.shape[:2], 1, value.shape[-1])
    assert state is not None
    assert state.S.shape == (*key.shape[:2], feature_map.num_features, value.shape[-1])
