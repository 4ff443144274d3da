"""Layers, blocks and language models of every kind, small and in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.feature_maps import EluPlusOne, FavorPlus, LearnedExponential, Taylor
from linattn.nn import Attention, Block, LinearAttention, LinearLM, SoftmaxAttention
from linattn.positions import FixedDecay, ForgetGate, Rotary

WIDTH, HEADS, HEAD_DIM, VOCABULARY = 12, 4, 4, 11
SIZES = {"num_kv_heads": 2, "head_dim": HEAD_DIM, "dtype": torch.float64}


def linear(feature_map, **options) -> LinearAttention:
    """A linear layer."""
    return LinearAttention(WIDTH, HEADS, feature_map, **{**SIZES, **options})


def softmax(**options) -> SoftmaxAttention:
    """A softmax layer."""
    return SoftmaxAttention(WIDTH, HEADS, **{**SIZES, **options})


LAYERS: dict[str, Callable[..., Attention]] = {
    "plain": lambda **o: linear(EluPlusOne(HEAD_DIM), **o),
    "random": lambda **o: linear(FavorPlus(HEAD_DIM, 8, num_heads=2), bias=True, **o),
    "learned": lambda **o: linear(LearnedExponential(HEAD_DIM, 8), qk_norm="layer", **o),
    "rotary": lambda **o: linear(Taylor(HEAD_DIM), positions=Rotary(HEAD_DIM), qk_norm="rms", output_gate=True, **o),
    "gated": lambda **o: linear(EluPlusOne(HEAD_DIM), gate=ForgetGate(WIDTH, 2, input_gate="exponential"), **o),
    "decayed": lambda **o: linear(Taylor(HEAD_DIM), gate=FixedDecay.alibi(2), positions=Rotary(HEAD_DIM), **o),
    "window": lambda **o: linear(FavorPlus(HEAD_DIM, 8), window=2, **o),
    "gated-window": lambda **o: linear(
        FavorPlus(HEAD_DIM, 8), window=2, gate=ForgetGate(WIDTH, 2), positions=Rotary(HEAD_DIM), **o
    ),
    "softmax": lambda **o: softmax(**o),
    "softmax-rotary": lambda **o: softmax(positions=Rotary(HEAD_DIM), qk_norm="rms", output_gate=True, **o),
    "softmax-gated": lambda **o: softmax(gate=ForgetGate(WIDTH, 2), **o),
}
# Masked tokens inside a text count in the blocks of a window.
PADDABLE = [kind for kind in LAYERS if "window" not in kind]
# Gates are causal; positions give an order, which a memory does not share.
BIDIRECTIONAL = ["plain", "random", "learned", "rotary", "window", "softmax", "softmax-rotary"]
WITHOUT_ORDER = ["plain", "random", "learned", "softmax"]


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal tokens (…, WIDTH)."""
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def text(batch: int, length: int, seed: int = 0) -> Tensor:
    """Numbers of tokens (B, L)."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def hybrid(**options) -> LinearLM:
    """A language model of one layer of each kind."""
    return LinearLM(VOCABULARY, [Block(build(is_causal=True), **options) for build in LAYERS.values()])
