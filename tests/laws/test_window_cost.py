"""Rows beside a window cost by the keys they see: numbers written are counted, no time is taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import linattn
from linattn import MergedKV
from linattn.feature_maps import Expansion, FavorPlus, FeatureMap

HEAD_DIM, HEADS = 4, 2
MAPS: dict[str, Callable[[], FeatureMap]] = {
    "FavorPlus": lambda: FavorPlus(HEAD_DIM, 8),
    "Expansion": lambda: Expansion(HEAD_DIM),
}


class Written(TorchDispatchMode):
    """Counts the numbers of what each operation of torch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.numbers += sum(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))
        return found


def tokens(length: int) -> list[Tensor]:
    """Normal queries, keys and values."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator) for _ in range(3)]


def written(attend: Callable[..., object], *given: object, **options: object) -> int:
    """How many numbers a call writes, views among them, and not what a map prepares once."""
    with torch.no_grad():
        attend(*given, **options)
        with Written() as count:
            attend(*given, **options)
    return count.numbers


def of_a_token(feature_map: FeatureMap, window: int, num_kept: int) -> int:
    """Numbers written for one token after so many."""
    attend = partial(linattn.linear_attention_with_state, feature_map=feature_map, window=window, backend="blocked")
    return written(attend, *tokens(1), state=attend(*tokens(num_kept)).state)


@pytest.mark.parametrize("place", [1, 2], ids=["a block that begins", "a block that ends"])
def test_a_token_costs_in_proportion_to_the_window(place: int) -> None:
    """Of costs a + b·w, four times as wide a window costs four times as much at most."""
    feature_map, width = MAPS["FavorPlus"](), 32
    narrow, wide = (of_a_token(feature_map, w, place * w - (place > 1)) for w in (width, 4 * width))
    assert wide <= 4 * narrow


@pytest.mark.parametrize("num_queries", [1, 5])
def test_the_last_rows_of_a_call_cost_no_others(num_queries: int) -> None:
    """Of a call whose keys are all in the neighbourhood: a + b·L, whatever the window."""
    feature_map = MAPS["FavorPlus"]()

    def last(length: int, window: int) -> int:
        """Numbers written for the last rows."""
        query, key, value = tokens(length)
        given = (query[:, :, -num_queries:], key, value, feature_map)
        return written(linattn.linear_attention, *given, is_causal=True, window=window, backend="blocked")

    assert last(64, 64) == last(64, 4096)
    assert last(256, 256) <= 4 * last(64, 64)


@pytest.mark.parametrize("length", [1, 10, 16])
@pytest.mark.parametrize(
    ("name", "is_causal"),
    [("FavorPlus", False), ("Expansion", False), ("FavorPlus", True)],
    ids=["FavorPlus", "Expansion", "FavorPlus causal"],
)
def test_a_short_text_costs_the_same_beside_any_window(name: str, is_causal: bool, length: int) -> None:
    """Rows are never padded to the window."""
    given = *tokens(length), MAPS[name]()
    options = {"is_causal": is_causal, "backend": "blocked"}
    narrow, wide = (written(linattn.linear_attention, *given, window=w, **options) for w in (16, 4096))
    assert wide == narrow


@pytest.mark.parametrize("attend", [linattn.merged_attention, linattn.merged_partial], ids=["rows", "partial"])
@pytest.mark.parametrize("length", [10, 16, 32])
def test_a_short_text_costs_the_same_beside_merged_keys(attend: Callable[..., object], length: int) -> None:
    """Within two blocks no key is merged: the rows are softmax attention."""
    narrow, wide = (written(attend, *tokens(length), MergedKV(w, 4)) for w in (16, 4096))
    assert wide == narrow


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_keep_no_weight_of_near_keys(is_causal: bool) -> None:
    """Numbers kept for the backward pass, views once: as many beside a window four times as wide."""
    feature_map = MAPS["FavorPlus"]()

    def kept(window: int) -> int:
        """How many of one call."""
        sizes: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
            return x

        leaves = [x.requires_grad_() for x in tokens(512)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = linattn.linear_attention(*leaves, feature_map, is_causal=is_causal, window=window, backend="blocked")
        assert out.requires_grad
        return sum(sizes.values())

    assert kept(64) <= kept(16) * 1.1
