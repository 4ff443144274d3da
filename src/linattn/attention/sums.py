"""The sums that keys and values collapse into, (S, z, m), and large factors on their weights.

What exponents would round of a factor is kept apart: beside large ones those of keys would lose their digits.
Letters as in attention/__init__.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap
from linattn.softmax.tracing import has_values, is_followed

if TYPE_CHECKING:
    from linattn.attention.state import State


class Sums(NamedTuple):
    """S = Σ φ(k)vᵀ·exp(-m), z = Σ φ(k)·exp(-m), and the exponent m they are relative to."""

    S: Tensor  # (B, H, R, Dv)
    z: Tensor  # (B, H, R)
    m: Tensor  # (B, H, M)

    def merge(self, other: Sums) -> Sums:
        """The sums over both sets of keys."""
        m = torch.maximum(self.m, other.m)
        first, second = (per_feature((x.m - m).exp(), self.z.shape[-1]) for x in (self, other))
        S = self.S * first.unsqueeze(-1) + other.S * second.unsqueeze(-1)
        return Sums(S, self.z * first + other.z * second, m)

    def decay(self, log_factor: Tensor) -> Sums:
        """All weights times exp(log_factor), (B or 1, H or 1): a shift of m, S kept; the sums of no keys at -inf."""
        shift, none = log_factor.to(self.m.dtype).unsqueeze(-1), lowest(self.m.dtype)
        (S, z, m), gone = self, shift == -torch.inf
        # Half of it: a finite factor makes no key look like none.
        m = torch.where(m <= none, none, (m + shift.detach()).clamp(none / 2, -none / 2))
        # The maximum is a constant for gradients: that of the factor goes through S and z.
        if is_followed(shift):
            one = torch.exp(torch.where(gone, 0, shift - shift.detach()))
            S, z = S * one.unsqueeze(-1), z * one
        if has_values(gone) and not bool(gone.any()):
            return Sums(S, z, m)
        return Sums(torch.where(gone.unsqueeze(-1), 0, S), torch.where(gone, 0, z), torch.where(gone, none, m))


def lowest(dtype: torch.dtype) -> float:
    """The running maximum of no keys: finite, so that differences of maxima are never inf - inf."""
    return torch.finfo(dtype).min / 4


def no_sums(
    feature_map: FeatureMap, batch: int, heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> Sums:
    """The sums of no keys."""
    num_features = feature_map.num_features
    S = torch.zeros(batch, heads, num_features, value_dim, dtype=dtype, device=device)
    m = torch.full((batch, heads, feature_map.num_exponents), lowest(dtype), dtype=dtype, device=device)
    return Sums(S, S.new_zeros(batch, heads, num_features), m)


def per_feature(factors: Tensor, num_features: int) -> Tensor:
    """One factor for each of R features, of M = 1, R or any divisor of R: (…, M) -> (…, R), or (…, 1)."""
    count = factors.shape[-1]
    return factors if count in (1, num_features) else factors.repeat_interleave(num_features // count, -1)


# Exponents of this size keep 4e-6 of a weight in float32; whole steps add up unrounded, thousands of them in a stream.
_FAR, _STEP = 64.0, 2.0**-16
# An exponent of this over a dtype's rounding, 4,096 in float32, keeps this share of a weight.
_FAINT = 2.0**-11


def split_factor(log_factor: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
    """The part of a float64 factor (B or 1, H or 1) on a state that exponents take, and that kept apart, (B, H)."""
    dtype, held = state.m.dtype, 0 if state.apart is None else state.apart
    far, rounded = log_factor.detach() + held, log_factor.detach().to(dtype)
    is_seen, gone = has_values(far) and not far.is_meta, rounded == -torch.inf
    if is_seen and not bool((rounded < torch.inf).all()):
        raise ValueError(
            f"log_factor must be finite, or -inf for the state of no keys, got {log_factor.flatten().tolist()[:8]}; "
            "it is the logarithm of a factor on each key's weight"
        )
    # Of a far one exponents take 0, with its gradient.
    steps = torch.where(far.abs() <= _FAR, far if far.dtype == dtype else (far / _STEP).round() * _STEP, 0)
    rest, here = torch.where(gone, held, far - steps), log_factor - log_factor.detach()
    taken = torch.where(gone, -torch.inf, here + steps)
    # Where nothing can be looked at, it may be 0.
    return taken, None if is_seen and not bool(rest.any()) else rest.expand(state.m.shape[:2])


def relative_to(state: State, bias: Tensor | None, length: int) -> tuple[State, Tensor | None, Tensor | None]:
    """A state and the biases (B, H or 1, L) of tokens after it, relative to a factor apart (B, H), None for none."""
    if (apart := state.apart) is None:
        return state, bias, None
    biases = apart.new_zeros(1, 1, length) if bias is None else bias
    if has_values(apart) and bool((apart.abs() <= _STEP).all()):
        return replace(state, apart=None), (biases - apart.unsqueeze(-1)).to(state.m.dtype), apart
    newest = apart.new_full((1, 1), 0.0 if length else -torch.inf)
    if bias is not None and length:
        newest = bias.detach().amax(-1).to(apart.dtype)
    # It stays apart where the state's keys weigh at least as much as each token. Elsewhere exponents take it, as far as
    # rows that see the state alone keep their digits: keys fainter still weigh nothing beside a token.
    peak = _peak(state)
    apart = torch.where(peak == -torch.inf, 0, apart)  # A factor on no keys is none.
    stays = (apart + peak >= newest) | (apart.abs() <= _STEP)
    least = newest - peak - _FAINT / torch.finfo(state.m.dtype).eps
    near = replace(state, apart=torch.where(stays, apart, torch.maximum(apart, least)))
    apart = torch.where(stays, apart, 0)
    near = replace(near.without(apart), apart=None)
    if has_values(apart) and not bool(apart.any()):
        return near, bias, None
    return near, (biases - apart.unsqueeze(-1)).to(near.m.dtype), apart


def apart_of(state: State) -> Tensor:
    """The factor apart on a state's keys, (B, H), float64; -inf where it holds nothing."""
    apart = state.m.new_zeros((), dtype=torch.float64) if state.apart is None else state.apart
    return torch.where(_peak(state) == -torch.inf, -torch.inf, apart)


def _peak(state: State) -> Tensor:
    """The largest exponent of what a state holds, (B, H); -inf where it holds nothing."""
    m = state.m.detach()
    exponents = torch.where(m <= lowest(m.dtype), -torch.inf, m)[..., : state.S.shape[2]]
    biases = [] if state.window is None else [state.window.tokens().bias.detach()]
    return torch.cat([m.new_full((*m.shape[:2], 1), -torch.inf), exponents, *biases], -1).amax(-1)
