"""Weights taken over from torch.nn.MultiheadAttention."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import linattn
from layers import tokens
from linattn.feature_maps import EluPlusOne, FavorPlus
from linattn.nn import LinearAttention


def multihead(**options) -> nn.MultiheadAttention:
    """Torch's layer, with weights and biases that are not 0."""
    mha = nn.MultiheadAttention(12, 3, **{"batch_first": True, "dtype": torch.float64, **options})
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mha


def by_hand(mha: nn.MultiheadAttention, weights, feature_map, x, memory):
    """The op between torch's own projections."""
    biases = [None] * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    heads = [
        nn.functional.linear(of, weight, bias).unflatten(-1, (3, 4)).transpose(1, 2)
        for of, weight, bias in zip((x, memory, memory), weights, biases, strict=True)
    ]
    out = linattn.linear_attention(*heads, feature_map)
    return mha.out_proj(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("bias", [False, True])
def test_joint_weights_are_taken_over(bias: bool) -> None:
    mha, x, favor = multihead(bias=bias).eval(), tokens(2, 6), FavorPlus(4, 8)
    layer = LinearAttention.from_multihead_attention(mha, favor)
    torch.testing.assert_close(layer(x), by_hand(mha, mha.in_proj_weight.chunk(3), favor, x, x), rtol=1e-12, atol=1e-12)
    assert not layer.training
    assert layer.q_proj.weight.data_ptr() != mha.in_proj_weight.data_ptr()


def test_weights_that_are_made_at_each_look_are_taken_over() -> None:
    """As by a parametrisation, for which torch takes the parameters away, or by pruning."""
    mha, x, favor = multihead().eval(), tokens(2, 6), FavorPlus(4, 8)
    prune.l1_unstructured(mha, "in_proj_weight", 0.5)
    nn.utils.parametrizations.weight_norm(mha, "in_proj_bias", dim=None)
    layer = LinearAttention.from_multihead_attention(mha, favor)
    torch.testing.assert_close(layer(x), by_hand(mha, mha.in_proj_weight.chunk(3), favor, x, x), rtol=1e-12, atol=1e-12)


def test_separate_weights_of_a_memory_are_taken_over() -> None:
    mha, x, memory = multihead(kdim=5, vdim=5), tokens(2, 6), tokens(2, 7)[..., :5]
    feature_map = EluPlusOne(4)
    layer = LinearAttention.from_multihead_attention(mha, feature_map)
    weights = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
    torch.testing.assert_close(layer(x, memory), by_hand(mha, weights, feature_map, x, memory), rtol=1e-12, atol=1e-12)
    assert (layer.memory_dim, layer.k_proj.in_features, layer.training) == (5, 5, True)
    with pytest.raises(ValueError, match="attends to a memory of width 5, its own tokens are 12 wide"):
        layer(x)


def test_with_every_key_exact_it_is_torchs_own() -> None:
    mha, x = multihead(), tokens(2, 6)
    layer = LinearAttention.from_multihead_attention(mha, FavorPlus(4, 8), window=8)
    torch.testing.assert_close(layer(x), mha(x, x, x, need_weights=False)[0], rtol=1e-12, atol=1e-12)
    causal = LinearAttention.from_multihead_attention(mha, FavorPlus(4, 8), window=8, is_causal=True)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = mha(x, x, x, attn_mask=future, need_weights=False)[0]
    torch.testing.assert_close(causal(x), expected, rtol=1e-12, atol=1e-12)


REFUSED = {
    "got kdim=5 and vdim=12": {"kdim": 5},
    "got add_bias_kv=True": {"add_bias_kv": True},
    "got add_zero_attn=True": {"add_zero_attn": True},
    "got dropout=0.1": {"dropout": 0.1},
    "say batch_first=True": {"batch_first": False},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_place_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearAttention.from_multihead_attention(multihead(**REFUSED[message]), EluPlusOne(4))


def test_another_layout_is_taken_when_said() -> None:
    mha, x = multihead(batch_first=False), tokens(2, 6)
    layer = LinearAttention.from_multihead_attention(mha, EluPlusOne(4), batch_first=True)
    expected = by_hand(mha, mha.in_proj_weight.chunk(3), EluPlusOne(4), x, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match=r"must be a torch.nn.MultiheadAttention, got Linear"):
        LinearAttention.from_multihead_attention(nn.Linear(2, 2), EluPlusOne(4))
