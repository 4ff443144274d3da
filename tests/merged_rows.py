"""Tokens and calls of the laws of merged keys in compiled code."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import linattn
from grid import qkv
from linattn import Exact
from linattn.attention.exact import MergedKeys

LENGTH = 331
# Logits are sums of D = 8 products of numbers below 5, a quarter of which is rounding; rows are means by their powers.
TOLERANCE = 8 * 25 * torch.finfo(torch.float32).eps


def given(groups: int = 1, **sizes: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of two rows and two key/value heads."""
    return qkv(heads=2 * groups, num_queries=LENGTH, num_keys=LENGTH, dtype=torch.float32, **sizes)


def streamed(
    tokens: tuple[Tensor, ...],
    exact: Exact,
    backend: str = "compiled",
    cuts: tuple[int, ...] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, MergedKeys]:
    """All rows of a stream in pieces, and what is kept of it."""
    state, outs, length = None, [], tokens[1].shape[2]
    for start, stop in itertools.pairwise((0, *cuts, length)):
        out, state = linattn.linear_attention_with_state(
            *(x[:, :, start:stop] for x in tokens),
            None,
            state,
            enable_gqa=True,
            exact=exact,
            backend=backend,
            key_bias=None if bias is None else bias[..., start:stop],
        )
        outs.append(out)
    assert state is not None
    assert isinstance(state.exact, MergedKeys)
    return torch.cat(outs, 2), state.exact


def leaves(kept: MergedKeys) -> list[Tensor]:
    """What is kept, tensor by tensor."""
    return [*kept.merged, *kept.sample, *kept.recent]


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


def everywhere(tokens: tuple[Tensor, ...], exact: Exact, backend: str = "compiled", **weights: Tensor | None) -> Tensor:
    """The op with every key in view."""
    return linattn.linear_attention(*tokens, None, enable_gqa=True, exact=exact, backend=backend, **weights)
