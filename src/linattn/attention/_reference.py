"""The quadratic truth: every weight φ(q_i)·φ(k_j) is formed, in any dtype; slow and clear, differentiable by autograd
alone.

Shares nothing with the blocked backend but the shape of a state. Memory O(Lq·Lk·R) for exponential maps, whose weights
are formed as log Σ_f exp(log φ_f(q) + log φ_f(k)) so that no scale overflows. Letters as in _blocked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from linattn.attention._blocked import Moments
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.feature_maps._swapping import with_swapped_tensors


def attend(
    feature_map: FeatureMap,
    own: Mapping[str, Tensor],
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,  # (B, H, Lk, Dv)
    mask: Tensor | None,  # (B, H or 1, Lk)
    before: Moments,  # S, z, m
    *,
    is_causal: bool,
    span: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Moments]:
    """Output, denominator, its exponent, and the moments after all keys; causal is aligned bottom-right.

    With `span`, for as many queries as keys, causal rows see the keys of earlier spans of so many tokens only.
    """
    with torch.autocast(query.device.type, enabled=False):
        seen = _visible(query.shape[3], key.shape[2], mask, query.device, is_causal=is_causal, span=span)
        return _attend(with_swapped_tensors(feature_map, own), query, key, value, mask, before, seen)


def _attend(
    feature_map: FeatureMap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    before: Moments,  # S, z, m
    visible: Tensor,  # broadcasting to (B, H, G, Lq, Lk)
) -> tuple[Tensor, Tensor, Tensor, Moments]:
    """The same with the map's tensors in place."""
    m = before[2]
    sums = torch.cat((before[0], before[1].unsqueeze(-1)), -1)
    if mask is not None:
        key, value = (torch.where(mask.unsqueeze(-1), x, 0) for x in (key, value))
    q, k = query.to(sums.dtype), key.to(sums.dtype)
    extended = torch.cat((value, value.new_ones(*value.shape[:-1], 1)), -1).to(sums.dtype)
    if isinstance(feature_map, GroupedFeatureMap):
        rows, reference = _grouped_rows(feature_map, q, k, extended, visible, sums, m)
        log_k, phi_k = feature_map.key_log_weight(k), feature_map.key(k)
    elif feature_map.exponential:
        lq, lk = feature_map.query(q.flatten(2, 3)).unflatten(2, q.shape[2:4]), feature_map.key(k)
        weights = torch.logsumexp(lq.unsqueeze(4) + lk[:, :, None, None], -1)  # (B, H, G, Lq, Lk)
        exponents = torch.where(visible, weights, -torch.inf)
        from_state = lq + m[:, :, None, None]
        reference = torch.maximum(_peak(exponents, from_state), from_state.amax(-1))
        rows = torch.exp(exponents - reference.unsqueeze(-1)) @ extended.unsqueeze(2)
        rows = rows + torch.exp(from_state - reference.unsqueeze(-1)) @ sums.unsqueeze(2)
        log_k, phi_k = lk, None
    else:
        phi_q, phi_k = feature_map.query(q.flatten(2, 3)).unflatten(2, q.shape[2:4]), feature_map.key(k)
        weight = feature_map.key_log_weight(k)
        log_k = phi_k.new_zeros(phi_k.shape[:-1]).unsqueeze(-1) if weight is None else weight.unsqueeze(-1)
        exponents = torch.where(visible, log_k[:, :, None, None, :, 0], -torch.inf)
        state_exponent = m[:, :, None, None, 0]
        reference = torch.maximum(_peak(exponents, phi_q), state_exponent)
        weights = (phi_q @ phi_k.mT.unsqueeze(2)) * torch.exp(exponents - reference.unsqueeze(-1))
        rows = weights @ extended.unsqueeze(2)
        rows = rows + (phi_q @ sums.unsqueeze(2)) * torch.exp(state_exponent - reference).unsqueeze(-1)
    out, den = _divide(rows)
    after = _moments(
        sums, m, log_k if mask is None else torch.where(mask.unsqueeze(-1), log_k, -torch.inf), phi_k, extended
    )
    return out.to(query.dtype), den, reference, after


def _grouped_rows(
    feature_map: GroupedFeatureMap, q: Tensor, k: Tensor, extended: Tensor, visible: Tensor, sums: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Row sums (B, H, G, Lq, Dv + 1) and their exponent: query features centred on the z of the very keys each sees."""
    shape, num_groups = q.shape[2:4], feature_map.num_groups
    q = q.flatten(2, 3)
    group = feature_map.group(q)
    number = group.unsqueeze(-1)
    places = feature_map.places().to(q.dtype).expand(*m.shape[:2], -1, -1)
    psi, log_k = feature_map.key(k), feature_map.key_log_weight(k)
    exponents = torch.take_along_dim(log_k.mT, number, -2).unflatten(2, shape)
    exponents = torch.where(visible, exponents, -torch.inf).flatten(2, 3)
    state_exponent = torch.take_along_dim(m, group, -1)
    reference = torch.maximum(_peak(exponents, number), state_exponent)
    weights = torch.exp(exponents - reference.unsqueeze(-1))
    decay = torch.exp(state_exponent - reference).unsqueeze(-1)
    # The sums of each query's own group, as its keys leave them.
    own = torch.take_along_dim(sums.unflatten(2, (num_groups, -1)), number.unsqueeze(-1), 2) * decay.unsqueeze(-1)
    z = weights @ psi + own[..., -1]
    phi_q, log_weight = feature_map.local_query(q, torch.take_along_dim(places, number, -2), z)
    found = (weights * (phi_q @ psi.mT)) @ extended + (phi_q.unsqueeze(-2) @ own).squeeze(-2)
    den = torch.maximum(found[..., -1], feature_map.least_normalizer(z))
    found = torch.cat((found[..., :-1], den.unsqueeze(-1)), -1)
    return found.unflatten(2, shape), (reference + log_weight).unflatten(2, shape)


def _visible(
    num_queries: int, num_keys: int, mask: Tensor | None, device: torch.device, *, is_causal: bool, span: int
) -> Tensor:
    """Which keys a query sees, broadcasting to (B, H, G, Lq, Lk)."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if span:
        number = torch.arange(num_keys, device=device) // span
        seen = number.unsqueeze(-1) > number
    elif is_causal:
        seen = seen.tril(num_keys - num_queries)
    return seen if mask is None else seen & mask[:, :, None, None]


def _peak(exponents: Tensor, like: Tensor) -> Tensor:
    """The largest visible exponent of each row, finite also where nothing is visible; a constant for gradients."""
    floor = torch.finfo(exponents.dtype).min / 4
    if exponents.shape[-1] == 0:
        return torch.full(like.shape[:-1], floor, dtype=exponents.dtype, device=like.device)
    return exponents.detach().amax(-1).clamp(min=floor).expand(like.shape[:-1])


def _divide(rows: Tensor) -> tuple[Tensor, Tensor]:
    """num/den and den; 0 where no key was seen."""
    den = rows[..., -1]
    dead = den == 0
    out = torch.where(dead.unsqueeze(-1), 0, rows[..., :-1] / torch.where(dead, 1, den).unsqueeze(-1))
    return out, den


def _moments(sums: Tensor, m: Tensor, log_k: Tensor, phi_k: Tensor | None, extended: Tensor) -> Moments:
    """Σ φ(k)[v, 1]ᵀ·exp(-m) over the state and the keys as S and z, and m."""
    if log_k.shape[-2] == 0:
        return Moments(sums[..., :-1], sums[..., -1], m)
    peak = torch.maximum(m, log_k.detach().amax(-2))
    features = torch.exp(log_k - peak.unsqueeze(-2))
    if phi_k is not None and features.shape[-1] > 1:
        features = features.unsqueeze(-1) * phi_k.unsqueeze(-2)
    elif phi_k is not None:
        features = features * phi_k
    decay = torch.exp(m - peak)
    if features.ndim > extended.ndim:
        features, decay = features.flatten(-2), decay.repeat_interleave(features.shape[-1], -1)
    sums = sums * decay.unsqueeze(-1) + features.mT @ extended
    return Moments(sums[..., :-1], sums[..., -1], peak)
