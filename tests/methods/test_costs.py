"""Counts of numbers, against the tensors themselves."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from linattn.attention import State
from linattn.feature_maps import EluPlusOne, Expansion, FavorPlus
from linattn.methods.measures import exact_state_numbers, map_state_numbers

D, DV = 5, 3


@pytest.mark.parametrize("feature_map", [Expansion(D, num_centres=4), FavorPlus(D, 8), EluPlusOne(D)], ids=repr)
def test_state_numbers_are_those_of_a_state(feature_map):
    state = State.empty(feature_map, batch_size=1, num_heads=1, value_dim=DV)
    assert map_state_numbers(feature_map, value_dim=DV) == sum(x.numel() for x in tree_leaves(state))
    # Two blocks of four keys and values.
    assert map_state_numbers(feature_map, value_dim=DV, window=4) == map_state_numbers(
        feature_map, value_dim=DV
    ) + 2 * 4 * (D + DV)


def test_exact_attention_keeps_every_token():
    assert exact_state_numbers(7, head_dim=D, value_dim=DV) == torch.zeros(7, D + DV).numel()
