"""Rows of the attention matrix that linear attention never forms; letters as in attention/__init__.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.attention.bound_map import bind
from linattn.attention.checking import checked_for, live_keys
from linattn.attention.sums import lowest
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.softmax.attention import causal_mask, inert
from linattn.softmax.checking import check_indices
from linattn.softmax.partial import exponentials
from linattn.softmax.precision import accumulation_dtype, are_large, divided, enlarged, lift, rescaled, small_power
from linattn.softmax.tracing import has_values

# Exponents held at once when rows are formed one weight at a time.
_BUDGET = 2**24


def attention_rows(
    query: Tensor,
    key: Tensor,
    feature_map: FeatureMap,
    query_index: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Rows of the implied attention matrix: what each chosen query attends to.

        a_ij = φ(q_i)·φ(k_j)·exp(b_j) / Σ_l φ(q_i)·φ(k_l)·exp(b_l),   so that out_i = Σ_j a_ij v_j

    O(n·Lk·R + Lk·R·D) time and O(n·Lk) memory per head for n rows; causal rows are formed with their own maximum and
    cost n·Lk·R exponentials.

    Args:
        query, key, feature_map, key_mask, key_bias, is_causal, enable_gqa: as in `linear_attention`.
        query_index: (n,) integers in [-Lq, Lq): which rows.

    Returns:
        (B, H, n, Lk), at least float32; rows sum to 1 (0 where no key is seen). Signed maps have negative entries.

    Raises:
        TypeError, ValueError: as `linear_attention`; `query_index` is not a 1-D integer tensor or out of range.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [1.0, 3.0]))
        >>> attention_rows(q, k, relu, torch.tensor([0])).flatten().tolist()
        [0.25, 0.75]
    """
    query, key, _, bias = checked_for(feature_map, (query, key, key), key_mask, key_bias, enable_gqa=enable_gqa)
    length = query.shape[2]
    rows = check_indices(query_index, name="query_index")
    if query_index.numel() and (torch.compiler.is_compiling() or has_values(query_index)):
        low, high = int(query_index.min()), int(query_index.max())
        if not -length <= low <= high < length:
            raise ValueError(f"query_index must lie in [{-length}, {length}), got {low} to {high}")
    heads, dtype = (key.shape[1], query.shape[1] // max(key.shape[1], 1)), accumulation_dtype(query.dtype)
    bound, query, key = bind(feature_map, query, key, live_keys(bias), is_causal=is_causal)
    zero = query.new_zeros(1, 1, key.shape[2], dtype=dtype)
    logit_bias = (zero if bias is None else bias)[:, :, None, None]
    (key,) = inert(bias, key)
    if is_causal:
        logit_bias = torch.where(causal_mask(query.shape[2], key.shape[2], query.device)[rows], logit_bias, -torch.inf)
    chosen = query[:, :, rows].unflatten(1, heads).to(dtype)
    plain = _log_weights if is_causal and feature_map.exponential else _weights
    weigh: Callable[..., Tensor] = _grouped_weights if isinstance(feature_map, GroupedFeatureMap) else plain
    inputs, least = [chosen, key.to(dtype), logit_bias], 1.0
    weights: Tensor = bound.run(weigh, query.device, *inputs)
    if weigh is _weights and not feature_map.exponential and are_large([lift(weights.sum(-1))]):
        # Gradients within are far smaller: they are divided by sums that may be as small as numbers can be.
        inputs, least = [enlarged(x, dtype) for x in inputs], small_power(dtype)
        bound = bound._replace(tensors={name: enlarged(x, dtype) for name, x in bound.tensors.items()})
        weights = bound.run(weigh, query.device, *inputs)
    return rescaled(divided(weights, weights.sum(-1, keepdim=True)), 1, least).flatten(1, 2)


def _weights(feature_map: FeatureMap, query: Tensor, key: Tensor, logit_bias: Tensor) -> Tensor:
    """Weights (B, H, G, n, Lk) by one product, each row on its own scale; `logit_bias` broadcasts to that shape."""
    phi_q, phi_k = feature_map.query(query.flatten(2, 3)).to(key), feature_map.key(key).to(key)
    if feature_map.exponential:
        # Not causal: all rows see the same keys, so that one maximum per feature serves them.
        exponents = phi_k + logit_bias[:, :, 0, 0].unsqueeze(-1)
        c = exponents.detach().amax(-2, keepdim=True) if key.shape[-2] else phi_k.new_zeros(1)
        c = c.clamp(min=lowest(phi_k.dtype))
        phi_q = phi_q + c
        phi_q = torch.exp(phi_q - phi_q.detach().amax(-1, keepdim=True))
        return torch.unflatten(phi_q @ torch.exp(exponents - c).mT, 2, query.shape[2:4])
    log_weight = feature_map.key_log_weight(key)
    logs = logit_bias if log_weight is None else log_weight.to(key)[:, :, None, None] + logit_bias
    return torch.unflatten(phi_q @ phi_k.mT, 2, query.shape[2:4]) * exponentials(logs)[0]


def _log_weights(feature_map: FeatureMap, query: Tensor, key: Tensor, logit_bias: Tensor) -> Tensor:
    """Weights from log Σ_f φ_f(q)φ_f(k), which no later key can underflow."""
    lq, lk = feature_map.query(query.flatten(2, 3)).to(key), feature_map.key(key).to(key)
    step = max(_BUDGET // max(lq[..., 0].numel() * lq.shape[-1], 1), 1)
    logs = torch.cat([torch.logsumexp(lq.unsqueeze(-2) + part.unsqueeze(-3), -1) for part in lk.split(step, -2)], -1)
    return exponentials(logs.unflatten(2, query.shape[2:4]) + logit_bias)[0]


def _grouped_weights(feature_map: GroupedFeatureMap, query: Tensor, key: Tensor, logit_bias: Tensor) -> Tensor:
    """Weights where a query reads one group, with features that depend on the keys it sees."""
    shape, query = query.shape[2:4], query.flatten(2, 3)
    number = feature_map.group(query).unsqueeze(-1)
    logs = torch.take_along_dim(feature_map.key_log_weight(key).mT, number, -2).unflatten(2, shape)
    weights, psi = exponentials(logs + logit_bias)[0].flatten(2, 3), feature_map.key(key)
    places = feature_map.places().to(query.dtype).expand(*number.shape[:2], -1, -1)
    phi_q, _ = feature_map.local_query(query, torch.take_along_dim(places, number, -2), weights @ psi)
    return torch.unflatten(weights * (phi_q @ psi.mT), 2, shape)
