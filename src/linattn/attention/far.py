"""Large factors on a state's weights, kept apart from its exponents: beside them those of keys would lose their digits.

Letters: B batch, H key/value heads, L tokens, M exponents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from linattn.attention.sums import lowest
from linattn.softmax.tracing import is_traced, is_transformed

if TYPE_CHECKING:
    from linattn.attention.state import State

# Exponents of this size keep 4e-6 of a weight in float32.
_FAR = 64.0


class Split(NamedTuple):
    """A logarithm of a factor, in two that make it up."""

    near: Tensor  # what exponents take, (B or 1, H or 1)
    far: Tensor | None  # what is kept apart, (B, H), float64


def split_factor(log_factor: Tensor, before: Tensor | None, shape: tuple[int, int]) -> Split:
    """A factor (B or 1, H or 1) on a state that has another apart; NaN and +inf are refused.

    Graphs and vmap have no values to look at, and exponents take all of it. So they do where it is -inf.
    """
    if is_traced(log_factor) or is_transformed() or log_factor.is_meta:
        return Split(log_factor, before)
    if before is None and bool((log_factor.abs() <= _FAR).all()):
        return Split(log_factor, None)
    if not bool((log_factor < torch.inf).all()):
        raise ValueError(
            f"log_factor must be finite, or -inf for the state of no keys, got {log_factor.flatten().tolist()[:8]}; "
            "it is the logarithm of a factor on each key's weight"
        )
    gone, far = log_factor == -torch.inf, log_factor.detach()
    far = torch.where(gone, 0, far).double() + (0 if before is None else before)
    # Of a finite one exponents take 0, with its gradient.
    return Split(torch.where(gone, -torch.inf, log_factor - log_factor.detach()), far.expand(shape))


def relative_to(state: State, bias: Tensor | None, length: int) -> tuple[State, Tensor | None, Tensor | None]:
    """A state and the biases (B, H or 1, L) of tokens after it, relative to a factor apart (B, H), None for none.

    It stays apart where the state's keys weigh at least as much as each token, else exponents take it.
    """
    apart = state.apart
    if apart is None:
        return state, bias, None
    newest = apart.new_full((1, 1), 0.0 if length else -torch.inf)
    if bias is not None and length:
        newest = bias.detach().amax(-1).to(apart.dtype)
    apart = torch.where(apart + _peak(state) >= newest, apart, 0)
    near = replace(state.without(apart), apart=None)
    if not bool(apart.any()):
        return near, bias, None
    biases = apart.new_zeros(1, 1, length) if bias is None else bias
    return near, (biases - apart.unsqueeze(-1)).to(near.m.dtype), apart


def larger(first: State, second: State) -> Tensor | None:
    """The larger factor that either has apart, (B, H); None where neither has one."""
    if first.apart is None and second.apart is None:
        return None
    zero = first.m.new_zeros(first.m.shape[:2], dtype=torch.float64)
    return torch.maximum(*(zero if x.apart is None else x.apart for x in (first, second)))


def _peak(state: State) -> Tensor:
    """The largest exponent of what a state holds, (B, H); -inf where it holds nothing."""
    m = state.m.detach()
    exponents = torch.where(m <= lowest(m.dtype), -torch.inf, m)[..., : state.S.shape[2]]
    biases = [] if state.window is None else [state.window.tokens().bias]
    none = m.new_full((*m.shape[:2], 1), -torch.inf)
    return torch.cat([none, exponents, *(x.detach() for x in biases)], -1).amax(-1)
