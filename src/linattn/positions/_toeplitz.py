"""Sums over keys with a weight for each distance, by Fourier transforms; letters as in positions/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linattn.attention.bound_map import BoundMap
from linattn.feature_maps import FeatureMap

# Numbers of a chunk's transforms held at once, and tokens whose features are computed together.
_CHUNK, _BLOCK = 2**20, 1024


class Tokens(NamedTuple):
    """Queries, and the keys and values that they attend to, in float64."""

    query: Tensor  # (B, H, G, Lq, D)
    key: Tensor  # (B, H, Lk, D), attended ones first
    value: Tensor  # (B, H, Lk, Dv)
    alive: Tensor | None  # (B, Lk), which of them are attended to; None for all
    at: Tensor | None  # (B, Lq), where among the keys a query stands; None for the last Lq of them
    sees: Tensor  # (B or 1, 1, Lq or 1), whether it sees any key


class Kernel(NamedTuple):
    """A factor exp(b) for each distance, transformed."""

    spectrum: Tensor  # (H or 1, Hb, N/2 + 1), complex128
    norm: Tensor  # (H or 1, Hb), root of the factors' square sum
    length: int  # N

    @classmethod
    def of(cls, bias: Tensor, num_tokens: int, *, is_causal: bool) -> Self:
        """From biases (H or 1, Hb, n) of distances from 0, or of both signs around the middle."""
        needed = max(2 * num_tokens - 1, 1)
        # Fast to transform: 1, 3, 5, 9 or 15 times a power of two.
        length = min(odd << max(0, math.ceil(math.log2(needed / odd))) for odd in (1, 3, 5, 9, 15))
        bias = bias.double()
        zero = 0 if is_causal else bias.shape[-1] // 2
        later = bias[..., zero : zero + num_tokens]
        earlier = bias[..., :0] if is_causal else bias[..., zero - num_tokens + 1 : zero]
        used = torch.cat((later, earlier), -1)
        factors = torch.exp(used - used.detach().amax(-1, keepdim=True))
        first, last = factors.split((later.shape[-1], earlier.shape[-1]), -1)
        gap = factors.new_zeros(*factors.shape[:-1], length - factors.shape[-1])
        return cls(torch.fft.rfft(torch.cat((first, gap, last), -1)), factors.detach().norm(dim=-1), length)


class Columns:
    """Features of a call's tokens, some columns at a time, on the scale that keeps them finite.

    Keys are relative to the largest of each feature, rows of queries to their own largest.
    """

    def __init__(self, bound: BoundMap, tokens: Tokens) -> None:
        self._bound, self._tokens = bound, tokens
        self._device = tokens.key.device
        self.num_features = bound.feature_map.num_features
        with torch.no_grad():
            self._peak = self._key_peak()
            self._row_peak = self._query_peak()

    def of_keys(self, columns: slice) -> Tensor:
        """(B, H, L, C)."""
        features = self._blocks(_key_columns, self._tokens.key, (self._peak,), columns)
        return features if self._tokens.alive is None else features * self._tokens.alive[:, None, :, None]

    def of_queries(self, columns: slice) -> Tensor:
        """(B, H, G, L, C)."""
        query, peaks = self._tokens.query, (self._peak, self._row_peak)
        features: Tensor = self._blocks(_query_columns, query.flatten(2, 3), peaks, columns).unflatten(
            2, query.shape[2:4]
        )
        return features

    def _blocks(
        self, function: Callable[..., Tensor], x: Tensor, peaks: tuple[Tensor | None, ...], columns: slice
    ) -> Tensor:
        """A function of tokens and columns, block by block of tokens; backward computes features again."""
        parts = []
        for start in range(0, max(x.shape[2], 1), _BLOCK):
            at = slice(start, start + _BLOCK)
            row = tuple(peak if i == 0 or peak is None else peak[:, :, at] for i, peak in enumerate(peaks))
            run = partial(self._bound.run, function, self._device)
            parts.append(recomputed(run, x[:, :, at], *row, columns))
        return torch.cat(parts, 2)

    def _key_peak(self) -> Tensor | None:
        """The largest exponent over attended keys of each feature, (B, H, 1, R or 1); None where there are none."""
        feature_map, key, alive = self._bound.feature_map, self._tokens.key, self._tokens.alive
        highest = None
        for start in range(0, key.shape[2], _BLOCK):
            at = slice(start, start + _BLOCK)
            exponents = self._bound.run(_key_exponents, self._device, key[:, :, at])
            if exponents is None:
                return None
            if alive is not None:
                exponents = exponents.masked_fill(~alive[:, None, at, None], -torch.inf)
            peak = exponents.amax(2, keepdim=True)
            highest = peak if highest is None else torch.maximum(highest, peak)
        if highest is None:
            return key.new_zeros(*key.shape[:2], 1, feature_map.num_exponents)
        return torch.where(highest == -torch.inf, 0, highest)

    def _query_peak(self) -> Tensor | None:
        """The largest exponent of each row of queries, (B, H, G·L, 1); None where features are no exponentials."""
        if not self._bound.feature_map.exponential:
            return None
        rows = self._tokens.query.flatten(2, 3)
        parts = [
            (self._bound.run(lambda feature_map, x: feature_map.query(x), self._device, block) + self._peak).amax(
                -1, keepdim=True
            )
            for block in rows.split(_BLOCK, 2)
        ]
        return torch.cat(parts, 2)


def convolved(columns: Columns, tokens: Tokens, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """Numerators (B, H, G, Lq, Dv), normalisers (B, H, G, Lq), and what rounding may add to them, (B, H, G, Lq)."""
    # Tokens last, as transforms want them: (B, H, Dv + 1, Lk).
    value = torch.cat((tokens.value, torch.ones_like(tokens.value[..., :1])), -1).mT.contiguous()
    rounding = torch.finfo(torch.float64).eps * math.log2(max(kernel.length, 2))
    total, noise = None, tokens.query.new_zeros(tokens.query.shape[:4])
    # As many features at once as transforms may hold numbers.
    size = max(1, _CHUNK // max(1, tokens.query.shape[:3].numel() * value.shape[2] * kernel.length))
    for start in range(0, columns.num_features, size):
        part, faint = recomputed(_chunk_sums, columns, tokens.at, value, kernel, slice(start, start + size))
        total = part if total is None else total + part
        noise += rounding * faint
    assert total is not None
    return total[..., :-1, :].mT, total[..., -1, :], noise


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), of which backward keeps the arguments alone."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _chunk_sums(
    columns: Columns, at: Tensor | None, value: Tensor, kernel: Kernel, chunk: slice
) -> tuple[Tensor, Tensor]:
    """The features' part of all sums, (B, H, G, Dv + 1, Lq), and of the bound on their rounding, (B, H, G, Lq)."""
    phi_k, phi_q = columns.of_keys(chunk), columns.of_queries(chunk)
    # Few value columns at a time: small tensors stay in the cache, and their memory is used again.
    width = max(1, _CHUNK // max(1, phi_q.shape[:3].numel() * phi_q.shape[4] * kernel.length))
    rest = (phi_k.mT.unsqueeze(-2), phi_q.mT.unsqueeze(-2), at, kernel)
    part = torch.cat([recomputed(_column_sums, piece, *rest) for piece in value.split(width, 2)], 3)
    with torch.no_grad():
        norms = phi_k.norm(dim=2)[:, :, None, :, None]  # (B, H, 1, C, 1)
        faint = (phi_q.abs() @ norms).squeeze(-1) * kernel.norm.unsqueeze(-1)
    return part, faint


def _column_sums(value: Tensor, phi_k: Tensor, phi_q: Tensor, at: Tensor | None, kernel: Kernel) -> Tensor:
    """(B, H, G, V, Lq) of V value columns (B, H, V, Lk) and features (B, H, C, 1, Lk), (B, H, G, C, 1, Lq)."""
    waves = torch.fft.rfft(phi_k * value.unsqueeze(2), kernel.length).unsqueeze(2) * kernel.spectrum[:, :, None, None]
    sums = torch.fft.irfft(waves, kernel.length)  # (B, H, Hb, C, V, N)
    if at is None:
        sums = sums[..., value.shape[-1] - phi_q.shape[-1] : value.shape[-1]]
    else:
        sums = sums.gather(-1, at[:, None, None, None, None].expand(-1, *sums.shape[1:-1], -1))
    products: Tensor = (phi_q * sums).sum(3)
    return products


def _key_exponents(feature_map: FeatureMap, x: Tensor) -> Tensor | None:
    """The exponents of keys, or the logarithms of their weights as one exponent; None without either."""
    if feature_map.exponential:
        return feature_map.key(x)
    weight = feature_map.key_log_weight(x)
    return None if weight is None else weight.unsqueeze(-1)


def _key_columns(feature_map: FeatureMap, x: Tensor, peak: Tensor | None, columns: slice) -> Tensor:
    """Features of keys relative to their largest."""
    phi = feature_map.key(x)[..., columns]
    if peak is None:
        return phi
    if feature_map.exponential:
        return torch.exp(phi - peak[..., columns])
    exponents = _key_exponents(feature_map, x)
    assert exponents is not None
    return phi * torch.exp(exponents - peak)


def _query_columns(
    feature_map: FeatureMap, x: Tensor, peak: Tensor | None, row_peak: Tensor | None, columns: slice
) -> Tensor:
    """Features of queries, exponentials relative to the row's largest."""
    phi = feature_map.query(x)[..., columns]
    if peak is None or row_peak is None:
        return phi
    return torch.exp(phi + peak[..., columns] - row_peak)
