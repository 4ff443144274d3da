"""The quadratic truth: every weight φ(q_i)·φ(k_j) is formed, in any dtype; slow, clear, differentiable by autograd.

Shares nothing with the blocked backend but the shape of the sums. Exponential maps' weights are formed as
log Σ_f exp(log φ_f(q) + log φ_f(k)), so that no scale overflows. Memory O(Lq·Lk), with their gradients O(Lq·Lk·R).
Letters as in attention/__init__.py.
"""

import torch
from torch import Tensor

from linattn.attention.backends.backend import Call, Rows, lifted, lifts
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.softmax.attention import causal_mask, inert
from linattn.softmax.precision import are_large, divided, enlarged, rescaled, small_power

# Terms of the logarithms that are summed at once.
_FEW_TERMS = 2**18


class Reference:
    """The definition, term by term; takes every call."""

    def objections(self, call: Call) -> list[str]:
        """None."""
        return []

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """All weights, then their sums."""
        bound, *tokens, bias, is_causal = call
        num_queries, num_keys = call.query.shape[3], call.key.shape[2]
        every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=call.key.device)
        visible = causal_mask(num_queries, num_keys, call.key.device, span) if is_causal else every
        rows, sums = bound.run(_attend, call.key.device, *tokens, bias, before, visible)
        if not are_large([factor for x in (rows, sums) for factor in lifts(x, bound.feature_map).values()]):
            return rows, sums
        # Gradients within are far smaller: they are divided by denominators that may be as small as numbers can be.
        dtype, least = before.z.dtype, small_power(before.z.dtype)
        S, z = (x.view_as(x) for x in before[:2])
        if S.requires_grad and z.requires_grad:
            # Infinite gradients of sums would be NaN further back.
            for x in (S, z):
                x.register_hook(lambda grad: grad.clamp(torch.finfo(grad.dtype).min, torch.finfo(grad.dtype).max))
        bound = bound._replace(tensors={name: enlarged(x, dtype) for name, x in bound.tensors.items()})
        before = Sums(enlarged(S, dtype), enlarged(z, dtype), before.m)
        inputs = (None if x is None else enlarged(x, dtype) for x in (*tokens, bias))
        rows, sums = bound.run(_attend, call.key.device, *inputs, before, visible)
        rows, sums = (lifted(x, bound.feature_map, least) for x in (rows, sums))
        return rows._replace(out=rescaled(rows.out, 1, least).to(call.query.dtype)), sums

    def absorb(self, call: Call, before: Sums) -> Sums:
        """The sums, without a query."""
        return self.attend(call._replace(query=call.query[..., :0, :], is_causal=False), before)[1]

    def read(self, call: Call, sums: Sums) -> Rows:
        """The rows, without a key."""
        return self.attend(call.with_keys(slice(0))._replace(is_causal=False), sums)[0]


def _attend(
    feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, before: Sums, seen: Tensor
) -> tuple[Rows, Sums]:
    """Rows and sums with the map's tensors in place, of queries that see some of the keys, (Lq, Lk)."""
    m, sums = before.m, torch.cat((before.S, before.z.unsqueeze(-1)), -1)
    key, value = inert(bias, key, value)
    bias = sums.new_zeros(1, 1, key.shape[2]) if bias is None else bias
    rise = torch.where(seen, bias[:, :, None, None], -torch.inf)  # (B, H or 1, 1, Lq, Lk)
    q, k = query.to(sums.dtype), key.to(sums.dtype)
    extended = torch.cat((value, value.new_ones(*value.shape[:-1], 1)), -1).to(sums.dtype)
    if isinstance(feature_map, GroupedFeatureMap):
        rows, reference = _grouped_rows(feature_map, q, k, extended, rise, sums, m)
        log_k, phi_k = feature_map.key_log_weight(k), feature_map.key(k)
    elif feature_map.exponential:
        lq, lk = feature_map.query(q.flatten(2, 3)).to(q).unflatten(2, q.shape[2:4]), feature_map.key(k).to(q)
        exponents, from_state = _log_weights(lq, lk) + rise, lq + m[:, :, None, None]
        reference = torch.maximum(_peak(exponents, from_state), from_state.amax(-1))
        rows = torch.exp(exponents - reference.unsqueeze(-1)) @ extended.unsqueeze(2)
        rows = rows + torch.exp(from_state - reference.unsqueeze(-1)) @ sums.unsqueeze(2)
        log_k, phi_k = lk, None
    else:
        phi_q, phi_k = feature_map.query(q.flatten(2, 3)).to(q).unflatten(2, q.shape[2:4]), feature_map.key(k).to(q)
        weight = feature_map.key_log_weight(k)
        log_k = phi_k.new_zeros(phi_k.shape[:-1]).unsqueeze(-1) if weight is None else weight.to(q).unsqueeze(-1)
        exponents, state_exponent = log_k[:, :, None, None, :, 0] + rise, m[:, :, None, None, 0]
        reference = torch.maximum(_peak(exponents, phi_q), state_exponent)
        weights = (phi_q @ phi_k.mT.unsqueeze(2)) * torch.exp(exponents - reference.unsqueeze(-1))
        rows = weights @ extended.unsqueeze(2)
        rows = rows + (phi_q @ sums.unsqueeze(2)) * torch.exp(state_exponent - reference).unsqueeze(-1)
    out = divided(rows[..., :-1], rows[..., -1:]).to(query.dtype)
    return Rows(out, rows[..., -1], reference), _after(sums, m, log_k + bias.unsqueeze(-1), phi_k, extended)


def _log_weights(lq: Tensor, lk: Tensor) -> Tensor:
    """log φ(q)·φ(k) (B, H, G, Lq, Lk); where there are many, a few queries of a head at a time, which a cache holds."""
    terms = lq.numel() * lk.shape[2]
    if terms <= _FEW_TERMS:
        return torch.logsumexp(lq.unsqueeze(4) + lk[:, :, None, None], -1)
    step = max(1, _FEW_TERMS * lq.shape[:2].numel() * lq.shape[3] // terms)
    heads = [
        torch.cat([torch.logsumexp(few.unsqueeze(2) + key, -1) for few in query.split(step, 1)], 1)
        for query, key in zip(lq.flatten(0, 1), lk.flatten(0, 1), strict=True)
    ]
    return torch.unflatten(torch.stack(heads), 0, lq.shape[:2])


def _grouped_rows(
    feature_map: GroupedFeatureMap, q: Tensor, k: Tensor, extended: Tensor, rise: Tensor, sums: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Row sums (B, H, G, Lq, Dv + 1) and their exponent: query features centred on the z of the very keys each sees."""
    shape, num_groups = q.shape[2:4], feature_map.num_groups
    q = q.flatten(2, 3)
    group = feature_map.group(q)
    number = group.unsqueeze(-1)
    places = feature_map.places().to(q.dtype).expand(*m.shape[:2], -1, -1)
    psi, log_k = feature_map.key(k), feature_map.key_log_weight(k)
    exponents = torch.take_along_dim(log_k.mT, number, -2).unflatten(2, shape)
    exponents, state_exponent = (exponents + rise).flatten(2, 3), torch.take_along_dim(m, group, -1)
    reference = torch.maximum(_peak(exponents, number), state_exponent)
    weights = torch.exp(exponents - reference.unsqueeze(-1))
    decay = torch.exp(state_exponent - reference).unsqueeze(-1)
    # The sums of each query's own group, as its keys leave them.
    former = torch.take_along_dim(sums.unflatten(2, (num_groups, -1)), number.unsqueeze(-1), 2) * decay.unsqueeze(-1)
    z = weights @ psi + former[..., -1]
    phi_q, log_weight = feature_map.local_query(q, torch.take_along_dim(places, number, -2), z)
    row_sums = (weights * (phi_q @ psi.mT)) @ extended + (phi_q.unsqueeze(-2) @ former).squeeze(-2)
    least = feature_map.least_normalizer(z)
    den = torch.where(row_sums[..., -1] < least / 2, least, row_sums[..., -1])
    row_sums = torch.cat((row_sums[..., :-1], den.unsqueeze(-1)), -1)
    return row_sums.unflatten(2, shape), (reference + log_weight).unflatten(2, shape)


def _peak(exponents: Tensor, like: Tensor) -> Tensor:
    """The largest visible exponent of each row, finite also where nothing is visible; a constant for gradients."""
    floor = torch.finfo(exponents.dtype).min / 4
    if exponents.shape[-1] == 0:
        return torch.full(like.shape[:-1], floor, dtype=exponents.dtype, device=like.device)
    return exponents.detach().amax(-1).clamp(min=floor).expand(like.shape[:-1])


def _after(sums: Tensor, m: Tensor, log_k: Tensor, phi_k: Tensor | None, extended: Tensor) -> Sums:
    """Σ φ(k)[v, 1]ᵀ·exp(-m) over the state and the keys as S and z, and m."""
    # Without keys too the sums depend on them: a rank that has none waits for gradients like the others.
    peak = torch.maximum(m, log_k.detach().amax(-2)) if log_k.shape[-2] else m
    features = torch.exp(log_k - peak.unsqueeze(-2))
    if phi_k is not None and features.shape[-1] > 1:
        features = features.unsqueeze(-1) * phi_k.unsqueeze(-2)
    elif phi_k is not None:
        features = features * phi_k
    decay = torch.exp(m - peak)
    if features.ndim > extended.ndim:
        features, decay = features.flatten(-2), decay.repeat_interleave(features.shape[-1], -1)
    sums = sums * decay.unsqueeze(-1) + features.mT @ extended
    return Sums(sums[..., :-1], sums[..., -1], peak)
