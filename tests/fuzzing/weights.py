"""What a map or softmax gives each pair of a query and a key, in float64: one row of weights for each query.

A weight is coefficient · exp(exponent): exponents are kept apart so that no scale overflows. Beside it stands what its
rounding is relative to. Shares nothing with the product but the maps' own features; an `Expansion` is written out from
its definition. Letters: B batch, H key/value heads, G query heads of each, N queries, M keys, D head width, R features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.machine import unit
from fuzzing.tokens import without_masked
from fuzzing.uses import used
from linattn.feature_maps import Centred, Expansion, FeatureMap

# Noise of exponents: rows that are off by more are not compared.
_MOST = 0.1


class Noise(NamedTuple):
    """Rounding as an experiment: random numbers of the size that a number may be off.

    Attributes:
        normal: standard normal numbers of a shape.
        amplified: how many times larger they are than rounding.
        outputs: the relative rounding of what parts put out, 0 where nothing is rounded before the end.
    """

    normal: Callable[..., Tensor]
    amplified: float
    outputs: float

    def __call__(self, like: Tensor, size: Tensor | float, most: float = torch.inf) -> Tensor:
        """Numbers in the shape of the first tensor, of the size of the second, at most so large."""
        size = torch.as_tensor(size, dtype=torch.float64).detach() * self.amplified
        return self.normal(*like.shape) * size.clamp(max=most)


class Weights(NamedTuple):
    """Weights of all pairs, broadcasting to (B, H, G, N, M)."""

    exponent: Tensor
    coefficient: Tensor
    error: Tensor  # of the coefficient, if sums run with a given unit of rounding
    row_exponent: Tensor  # (B, H, G, N, 1), a factor of the whole row
    ambiguous: Tensor  # (B, H, G, N): whether rounding decides a choice that the row depends on


class Weigher(NamedTuple):
    """A map as a kernel of one call.

    Attributes:
        map: with the statistics that it takes from the call in place.
        rounding: what sums run in.
        scale: of exact softmax, where `map` is None.
        beside: the map that takes the call's other keys, if this is exact softmax.
    """

    map: FeatureMap | None
    rounding: torch.dtype
    scale: float = 1.0
    beside: FeatureMap | None = None

    def uses(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as this part takes them.

        All uses that a call makes of a token are one where gradients follow means of the call, and of a query also
        where the map has weights of queries: those are added before they are rounded.
        """
        decisive = self.beside if self.map is None else self.map
        if decisive is None:
            return used(query), used(key)
        follows_means = any(x.requires_grad for x in decisive.buffers())
        has_weights = not decisive.exponential and decisive.query_log_weight(key[:, :, :0]) is not None
        return query if follows_means or has_weights else used(query), key if follows_means else used(key)

    def weigh(
        self, query: Tensor, key: Tensor, visible: Tensor, noise: Noise | None = None, bias: Tensor | None = None
    ) -> Weights:
        """Weights of queries (B, H, G, N, D) and keys (B, H, M, D); `visible` matters to linear maps alone.

        A bias (B, H or 1, 1, 1, M) raises the keys' exponents; where it is -inf, no key is visible.
        """
        bias = None if bias is None else torch.where(bias > -torch.inf, bias, 0)
        if isinstance(self.map, Expansion):
            return self._weigh(query, key, visible, noise, bias)
        found = self._weigh(query, key, visible, noise, None)
        return found if bias is None else _raised(found, bias, self.rounding, noise)

    def _weigh(self, query: Tensor, key: Tensor, visible: Tensor, noise: Noise | None, bias: Tensor | None) -> Weights:
        """Weights, which of all maps an expansion alone cannot give without the bias."""
        if noise is not None:
            query, key = (x * (1 + noise(x, 8 * unit(self.rounding))) for x in (query, key))
        query, key = self.uses(query, key)
        if self.map is None:
            return _softmax(query, key, self.scale, self.rounding, noise)
        if isinstance(self.map, Expansion):
            return _expansion(self.map, query, key, visible, self.rounding, noise, bias)
        if self.map.exponential:
            return _exponential(self.map, query, key, self.rounding, noise)
        return _linear(self.map, query, key, visible, self.rounding, noise)


def in_call(feature_map: FeatureMap, query: Tensor, key: Tensor, mask: Tensor | None, dtype: torch.dtype) -> FeatureMap:
    """The map with the statistics that it takes from a call of queries (B, Hq, Lq, D) and keys (B, H, Lk, D).

    Both are in float64, masked keys 0; `dtype` is the call's.
    """
    if not takes_from_call(feature_map):
        return feature_map
    # Parameters stay the same objects, so that gradients reach them.
    found = copy.deepcopy(feature_map, {id(parameter): parameter for parameter in feature_map.parameters()})
    if isinstance(found, Expansion):
        # Centres are clusters in the precision of the call; which ones is the map's own affair.
        given = query.detach().to(dtype), key.detach().to(dtype)
        for name, x in feature_map.call_tensors(*given, key_mask=mask, is_causal=False).items():
            setattr(found, name, x.double())
        return found
    assert isinstance(found, Centred)
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    both = mask if query.shape[2] == key.shape[2] else None
    seen = None if both is None else both.repeat(1, query.shape[1] // max(key.shape[1], 1))
    found.query_mean, found.key_mean = _mean(grouped, seen), _mean(key, mask)
    return found


def takes_from_call(feature_map: FeatureMap) -> bool:
    """Whether a map lacks statistics that a call can give it."""
    return isinstance(feature_map, Centred | Expansion) and getattr(feature_map, feature_map.fitted_buffers[0]) is None


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean token (B, H, 1, D); 0 where there is none."""
    count = torch.full((x.shape[0],), x.shape[2]) if mask is None else mask.sum(-1)
    return without_masked(x, mask).sum(2, keepdim=True) / count.clamp(min=1).view(-1, 1, 1, 1)


def _heads(x: Tensor) -> Tensor:
    """The largest number of each head, (B, H, 1, 1, 1), of (B, H, …)."""
    flat = x.detach().abs().flatten(2)
    return (flat.amax(-1) if flat.shape[-1] else flat.sum(-1))[..., None, None, None]


def _of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A map's function of tokens (B, H, …, D) with heads in the third last place."""
    return function(x.flatten(2, -2)).unflatten(2, x.shape[2:-1])


def _in_float32(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """How far the function of the tokens in float32 is from that in float64."""
    with torch.no_grad():
        low = x.detach().float()
        return _of(function, low).double() - _of(function, low.double())


def _sums(rounding: torch.dtype, query: Tensor, key: Tensor, num_features: int) -> float:
    """The relative error of sums over features and keys."""
    return unit(rounding) * (16 + query.shape[-1] + key.shape[2] + num_features)


def _certain(query: Tensor) -> Tensor:
    """No row depends on a choice."""
    return torch.zeros(query.shape[:4], dtype=torch.bool)


def _softmax(query: Tensor, key: Tensor, scale: float, rounding: torch.dtype, noise: Noise | None) -> Weights:
    """exp(scale · q·k)."""
    logits = scale * query @ key.mT.unsqueeze(2)
    sizes = _heads(scale * query.abs() @ key.abs().mT.unsqueeze(2))
    error = _sums(rounding, query, key, 0) + unit(rounding) * (query.shape[-1] + 8) * sizes
    if noise is not None:
        logits = logits + noise(logits, error, _MOST)
    zero = logits.new_zeros(1, 1, 1, 1, 1)
    return Weights(logits, zero + 1, error, zero, _certain(query))


def _exponential(
    feature_map: FeatureMap, query: Tensor, key: Tensor, rounding: torch.dtype, noise: Noise | None
) -> Weights:
    """Σ_f exp(lq_f + lk_f)."""
    lq, lk = _of(feature_map.query, query), _of(feature_map.key, key)
    off = _heads(_in_float32(feature_map.query, query)) + _heads(_in_float32(feature_map.key, key))
    error = _sums(rounding, query, key, feature_map.num_features) + 8 * off * (unit(rounding) / unit(torch.float32))
    error = error + unit(rounding) * 6 * (_heads(lq) + _heads(lk))
    if noise is not None:
        lq, lk = lq + noise(lq, error, _MOST), lk + noise(lk, error.squeeze(2), _MOST)
    exponent = torch.logsumexp(lq.unsqueeze(4) + lk[:, :, None, None], -1)
    zero = exponent.new_zeros(1, 1, 1, 1, 1)
    return Weights(exponent, zero + 1, error, zero, _certain(query))


def _linear(
    feature_map: FeatureMap,
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    rounding: torch.dtype,
    noise: Noise | None,
) -> Weights:
    """φ(q)·φ(k)·exp(ℓ(q) + ℓ(k))."""
    phi_q, phi_k = _of(feature_map.query, query), _of(feature_map.key, key)
    share = unit(rounding) / unit(torch.float32)
    norms = [x.detach().norm(dim=-1) for x in (phi_q, phi_k)]
    off = [
        8 * share * (_in_float32(function, x).norm(dim=-1) / norm).nan_to_num(0, 1, 1)
        for function, x, norm in ((feature_map.query, query, norms[0]), (feature_map.key, key, norms[1]))
    ]
    sums = _sums(rounding, query, key, feature_map.num_features)
    if noise is not None:
        phi_q, phi_k = (
            x + noise(x, (norm * (sums + one)).unsqueeze(-1))
            for x, norm, one in zip((phi_q, phi_k), norms, off, strict=True)
        )
    coefficient = phi_q @ phi_k.mT.unsqueeze(2)
    terms = phi_q.detach().abs() @ phi_k.detach().abs().mT.unsqueeze(2)
    product = norms[0].unsqueeze(-1) * norms[1][:, :, None, None]
    error = sums * terms + (off[0].unsqueeze(-1) + off[1][:, :, None, None]) * product
    # Products below the smallest normal number are lost.
    lost = 2 * torch.finfo(rounding).tiny * feature_map.num_features
    error = error + lost
    overlap = (phi_q != 0).double() @ (phi_k != 0).double().mT.unsqueeze(2) > 0
    # A row of nothing but lost products is neither 0 nor known.
    unclear = (overlap & visible).any(-1) & ~((terms > lost) & visible).any(-1)
    of_query, of_key = feature_map.query_log_weight, feature_map.key_log_weight
    zero = coefficient.new_zeros(1, 1, 1, 1, 1)
    log_q, log_k = zero, zero
    if of_key(key[:, :, :1]) is not None:
        log_q, log_k = _of_tokens(of_query, query).unsqueeze(-1), _of_tokens(of_key, key)[:, :, None, None]
        logs = unit(rounding) * (4 * _heads(log_q) + 16 * _heads(log_k))
        logs = logs + 8 * share * (_off(of_query, query) + _off(of_key, key))
        error = error + product * logs
        if noise is not None:
            log_q, log_k = log_q + noise(log_q, logs, _MOST), log_k + noise(log_k, logs, _MOST)
    return Weights(log_k, coefficient, error, log_q, unclear)


def _of_tokens(function: Callable[[Tensor], Tensor | None], x: Tensor) -> Tensor:
    """A logarithmic weight of tokens (B, H, …, D)."""
    found = function(x.flatten(2, -2))
    assert found is not None
    return found.unflatten(2, x.shape[2:-1])


def _off(function: Callable[[Tensor], Tensor | None], x: Tensor) -> Tensor:
    """How far a logarithmic weight in float32 is from that in float64, per head."""
    with torch.no_grad():
        low = x.detach().float()
        return _heads(_of_tokens(function, low).double() - _of_tokens(function, low.double()))


def _raised(weights: Weights, bias: Tensor, rounding: torch.dtype, noise: Noise | None) -> Weights:
    """Weights times exp(bias), which is rounded with what it is added to."""
    off = 6 * unit(rounding) * _heads(bias)
    exponent = weights.exponent + bias
    if noise is not None:
        exponent = exponent + noise(exponent, off, _MOST)
    return weights._replace(exponent=exponent, error=weights.error + off * weights.coefficient.detach().abs())


def _expansion(
    feature_map: Expansion,
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    rounding: torch.dtype,
    noise: Noise | None,
    bias: Tensor | None,
) -> Weights:
    """p_j·w_j around the query's nearest centre, from the definition: the mean key is that of the visible keys."""
    shape, scale = (query.shape[0], query.shape[1]), feature_map.scale
    centres, probes, mean, spread = (
        getattr(feature_map, name).double().expand(*shape, -1, -1) for name in feature_map.fitted_buffers
    )
    query_rows = query.detach().flatten(2, 3)
    terms = query_rows.abs() @ probes.abs().mT + (centres * probes).abs().sum(-1).unsqueeze(-2)
    closeness = query_rows @ probes.mT - (centres * probes).sum(-1).unsqueeze(-2) / 2
    best = closeness.topk(min(2, closeness.shape[-1]), -1)
    unclear = torch.zeros(query_rows.shape[:3], dtype=torch.bool)
    nearest = best.indices[..., 0]
    if best.values.shape[-1] == 2:
        gap = best.values[..., 0] - best.values[..., 1]
        places = torch.take_along_dim(centres, nearest.unsqueeze(-1), -2)
        other = torch.take_along_dim(centres, best.indices[..., 1:], -2)
        near = 16 * (query.shape[-1] + 4) * unit(rounding) * terms.amax(-1)
        unclear = (gap <= near) & (places != other).any(-1)
    centre = torch.take_along_dim(centres, nearest.unsqueeze(-1), -2).unflatten(2, query.shape[2:4])
    delta, keys = scale * (query - centre), key.unsqueeze(2)
    far = key.abs() + mean.abs()
    sizes = _heads((delta.abs() + scale * centre.abs()) @ far.mT.unsqueeze(2))
    sizes = sizes + _heads(scale * query.abs() @ mean.abs().mT.unsqueeze(2))
    relative = _sums(rounding, query, key, feature_map.num_local) + unit(rounding) * (query.shape[-1] + 16) * sizes
    if noise is not None:
        most = (1 + _heads(delta.abs() @ far.mT.unsqueeze(2))) ** feature_map.order
        keys = keys + noise(keys, relative * most * far.unsqueeze(2))
    logits = scale * centre @ keys.mT
    if bias is not None:
        logits = logits + bias
        relative = relative + 16 * unit(rounding) * _heads(bias)
    seen = torch.where(visible, logits, -torch.inf)
    p = torch.exp(
        seen - _finite(seen.detach().amax(-1, keepdim=True) if seen.shape[-1] else seen.sum(-1, keepdim=True))
    )
    total = p.sum(-1, keepdim=True)
    p = p / torch.where(total == 0, 1, total)
    products = delta @ keys.mT
    u = (p * products).sum(-1, keepdim=True)
    t, about = products - u, key - mean
    reach = torch.ones(())
    if feature_map.order == 1:
        deviation = delta.norm(dim=-1, keepdim=True) * spread.unsqueeze(2)
        reach = 1.5 / deviation.clamp(min=1.5)
        t = t * reach
    coefficient = (torch.ones_like(t), 1 + t, 1 + t + t.square() / 2)[feature_map.order]
    rows = delta @ mean.mT.unsqueeze(2) if feature_map.order == 0 else u
    # The product keeps moments of keys less their fixed mean, which are not centred on those seen.
    moments = delta.detach().abs() @ about.detach().abs().mT.unsqueeze(2)
    moments = reach.detach() * (moments + (p.detach() * moments).sum(-1, keepdim=True))
    size = (torch.ones_like(t), 1 + moments, (1 + moments).square())[feature_map.order].detach()
    return Weights(logits, coefficient, relative * size, rows, unclear.unflatten(2, query.shape[2:4]))


def _finite(x: Tensor) -> Tensor:
    """-inf as 0."""
    return torch.where(x == -torch.inf, 0, x)
