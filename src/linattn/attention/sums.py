"""The sums that keys and values collapse into, (S, z, m), and their arithmetic.

Letters: B batch, H key/value heads, Dv value width, R features, M exponents kept per head (the map's num_exponents).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap
from linattn.softmax.tracing import is_followed


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

        The maximum is a constant for gradients, so that of the factor goes through S and z, times exp(0).
        """
        shift = log_factor.to(self.m.dtype).unsqueeze(-1)
        gone, none = shift == -torch.inf, lowest(self.m.dtype)
        # Half of it: a finite factor makes no key look like none.
        m = torch.where(self.m <= none, none, (self.m + shift.detach()).clamp(none / 2, -none / 2))
        S, z = self.S, self.z
        if is_followed(shift):
            one = torch.exp(torch.where(gone, 0, shift - shift.detach()))
            S, z = S * one.unsqueeze(-1), z * one
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
