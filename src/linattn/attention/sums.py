"""The sums that keys and values collapse into, (S, z, m), and their arithmetic.

Letters: B batch, H key/value heads, Dv value width, R features, M exponents kept per head (the map's num_exponents).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.following import is_followed
from linattn.feature_maps import FeatureMap

# Remainders whose powers stay far from under- and overflow.
_FAR = 16.0


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
        """All weights times exp(log_factor), (B or 1, H or 1): a shift of m; the sums of no keys where it is -inf.

        What rounding takes from m is multiplied into S and z, so that features keep their ratios beside a shift of any
        size. The maximum is a constant for gradients, so that of the factor goes through S and z, times exp(0).
        """
        shift = log_factor.to(self.m.dtype).unsqueeze(-1)
        gone = shift == -torch.inf
        shift = torch.where(gone, 0, shift)
        m, rest = shifted(self.m, shift.detach())
        factor = per_feature(rest.exp(), self.z.shape[-1])
        if is_followed(shift):
            factor = factor * torch.exp(shift - shift.detach())
        S = torch.where(gone.unsqueeze(-1), 0, self.S * factor.unsqueeze(-1))
        return Sums(S, torch.where(gone, 0, self.z * factor), torch.where(gone, lowest(m.dtype), m))


def shifted(m: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Maxima m + shift, (B, H, M) and (B or 1, H or 1, 1), and what rounding leaves of them; those of no keys stay.

    Beyond shifts of about 1e8, whose neighbours are far apart, all of a head's maxima become one: m' = max m + shift.
    """
    bound = lowest(m.dtype)
    none = m <= bound
    total = m + shift
    part = total - m
    # Knuth's sum of two numbers and its error.
    rest = torch.where(none, 0, (m - (total - part)) + (shift - part))
    peak = m.amax(-1, keepdim=True)
    is_coarse = rest.abs().amax(-1, keepdim=True) > _FAR
    total, rest = torch.where(is_coarse, peak + shift, total), torch.where(is_coarse, m - peak, rest)
    # Half of it: a shift makes no key look like none.
    total = total.clamp(bound / 2, -bound / 2)
    return torch.where(none, m, total), torch.where(none, 0, rest)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, exponents and divisions run in at least float32."""
    return torch.promote_types(dtype, torch.float32)


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
