"""Tokens, calls and a layer of the laws of merged keys."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import qkv
from linattn import MergedKV, MergedState

# The wheel of compiled code is optional; where one is installed that does not fit, its laws fail.
BACKENDS = ("torch", "compiled") if find_spec("linattn_compiled") else ("torch",)
LENGTH = 331
# Logits are sums of D = 8 products of numbers below 5, a quarter of which is rounding; rows are means by their powers.
TOLERANCE = 8 * 25 * torch.finfo(torch.float32).eps


def given(groups: int = 1, **sizes: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of two rows and two key/value heads."""
    return qkv(heads=2 * groups, num_queries=LENGTH, num_keys=LENGTH, dtype=torch.float32, **sizes)


def streamed(
    tokens: tuple[Tensor, ...],
    config: MergedKV,
    backend: str = "compiled",
    cuts: tuple[int, ...] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, MergedState]:
    """All rows of a stream in pieces, and what is kept of it."""
    state, outs, length = None, [], tokens[1].shape[2]
    for start, stop in itertools.pairwise((0, *cuts, length)):
        out, state = linattn.merged_attention_with_state(
            *(x[:, :, start:stop] for x in tokens),
            config,
            state,
            enable_gqa=True,
            backend=backend,
            key_bias=None if bias is None else bias[..., start:stop],
        )
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 2), state


def leaves(kept: MergedState) -> list[Tensor]:
    """What is kept, tensor by tensor."""
    return pytree.tree_leaves(kept)


def biases(kind: str) -> Tensor | None:
    """Of keys that are masked, or weigh more and less; a head whose every key is masked, and a whole beginning."""
    draw = torch.Generator().manual_seed(3)
    if kind == "none":
        return None
    bias = torch.zeros(2, 2 if kind == "heads" else 1, LENGTH)
    if kind != "masks":
        bias += torch.randn(bias.shape, generator=draw)
    bias[torch.rand(bias.shape, generator=draw) < 0.3] = -torch.inf
    bias[0, 0, :100] = -torch.inf
    bias[1, -1] = -torch.inf
    return bias


def everywhere(
    tokens: tuple[Tensor, ...], config: MergedKV, backend: str = "compiled", **weights: Tensor | None
) -> Tensor:
    """Merged attention with every key in view."""
    return linattn.merged_attention(*tokens, config, enable_gqa=True, backend=backend, **weights)


class MergedLayer(torch.nn.Module):
    """Self-attention with merged keys; (B, L, 16) to (B, L, 16), two heads."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.projections, self.is_causal = torch.nn.Linear(16, 48), is_causal

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Tokens to tokens."""
        heads = self.projections(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        config = MergedKV(2, 3, bits=None)
        out = linattn.merged_attention(*heads, config, key_mask=key_mask, is_causal=self.is_causal)
        return out.transpose(1, 2).flatten(2)
