"""Attention with any relative bias; letters as in positions/__init__.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linattn.attention._check import check_map, checked_for
from linattn.attention.bound_map import bind
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.positions._toeplitz import Columns, Kernel, Tokens, convolved
from linattn.softmax.attention import inert
from linattn.softmax.precision import outside_autocast
from linattn.softmax.tracing import is_traced


def relative_bias_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    bias: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Linear attention with a bias for each distance, whatever its shape.

        out_i = Σ_j w_ij v_j / Σ_j w_ij,   w_ij = φ(q_i)·φ(k_j)·exp(b_{i-j})
              = φ(q_i)·Σ_j exp(b_{i-j}) φ(k_j)v_jᵀ / φ(q_i)·Σ_j exp(b_{i-j}) φ(k_j)

    Both inner sums are convolutions along the sequence, one for each feature and value column: time
    O(L·log L·R·(Dv + 1)) per head in float64, whatever the dtype of the tokens. Features are taken in chunks, forward
    and backward, so that memory is O(L·(D + C·Dv)) for a chunk of C features, independent of R. No state goes on from
    it: there is no O(1) recurrence for a generic b; `FixedDecay` has that for b = -λ·distance.

    Features of keys enter relative to the largest of each feature, queries relative to the row's largest. A transform's
    rounding is a part of the largest sum of a feature, not of each row's own: a row whose normaliser is far smaller
    loses digits. It is bounded for every row; a call with a row that may lose half of its dtype's digits is refused,
    and a compiled one, which cannot look, has NaN in that row. `torch.func` does not take the chunks' recomputation.
    Causal rows are relative to later keys too, so that those move earlier rows by roundings of that size.

    Args:
        query: (B, H, Lq, D), Lq ≤ Lk: the last ones, as in `linear_attention`.
        key: (B, H, Lk, D), or (B, Hkv, Lk, D) with `enable_gqa`.
        value: (B, H, Lk, Dv), or (B, Hkv, Lk, Dv) with `enable_gqa`.
        feature_map: any map whose weights are sums over features of products.
        bias: b, (1, Hkv or H, n), finite, differentiable: with `is_causal` (·, M), of distances 0 … M - 1; else
            (·, 2·M - 1), of distances i - j from 1 - M to M - 1; M ≥ Lk. A constant added to it changes nothing.
        key_mask: (B, Lk) bool, True = attend. Distances count attended tokens alone, so that padding, inside too, moves
            no token; a query at a masked one stands where the last attended one does.
        is_causal: query i sees keys j ≤ i + Lk - Lq.
        enable_gqa: groups of H / Hkv consecutive query heads share a key/value head. A bias of each query head costs
            its own inverse transforms.

    Returns:
        (B, H, Lq, Dv) in the query's dtype; 0 for a row that sees no key.

    Raises:
        TypeError: as `linear_attention`; `bias` is not a floating tensor.
        ValueError: as `linear_attention`; a map whose queries read one group of features each; more queries than keys;
            a bias of another shape or for fewer tokens; rounding would take half of the digits of a row.

    Example:
        >>> import math, torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> x, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[8.0], [2.0]]]])
        >>> near = torch.tensor([[math.log(0.5), 0.0, math.log(0.5)]])
        >>> relative_bias_attention(x, x, v, relu, near).flatten().round(decimals=4).tolist()
        [6.0, 4.0]

    Source: Luo et al. 2021 (arXiv 2106.12566), section 3.2.
    """
    check_map(feature_map)
    query, key, value, _ = checked_for(feature_map, (query, key, value), key_mask, None, enable_gqa=enable_gqa)
    _check_call(query, key, feature_map)
    table = _checked_bias(bias, query, key, is_causal=is_causal)
    if not key.shape[2]:
        return value.new_zeros(*query.shape[:3], value.shape[3])
    bound = bind(feature_map, query, key, key_mask, is_causal=is_causal)
    with outside_autocast(query.device):
        tokens = _on_a_grid(query, key, value, key_mask, is_causal=is_causal)
        num, den, noise = convolved(Columns(bound, tokens), tokens, Kernel.of(table, key.shape[2], is_causal=is_causal))
        lost = _lost_rows(den, noise, query.dtype)
        dead = (den == 0) | ~tokens.sees.unsqueeze(-2)
        out = torch.where(dead.unsqueeze(-1), 0, num / torch.where(dead, 1, den).unsqueeze(-1))
        if lost is not None:
            out = out.masked_fill(lost.unsqueeze(-1), torch.nan)
    return out.flatten(1, 2).to(query.dtype)


def _on_a_grid(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tokens:
    """The tokens in float64, attended keys moved together; where each query stands among them."""
    grouped = query.unflatten(1, (key.shape[1], -1)).double()
    batch, length, num_queries = key.shape[0], key.shape[2], query.shape[2]
    if key_mask is None:
        sees = torch.ones(1, 1, 1, dtype=torch.bool, device=key.device)
        return Tokens(grouped, key.double(), value.double(), None, None, sees)
    dead = torch.where(key_mask, 0.0, -torch.inf).unsqueeze(1)
    order = (~key_mask).to(torch.int8).argsort(dim=1, stable=True)[:, None, :, None]
    key, value = (x.gather(2, order.expand(batch, x.shape[1], -1, x.shape[3])) for x in inert(dead, key, value))
    at = key_mask.cumsum(1)[:, length - num_queries :] - 1
    sees = at >= 0 if is_causal else key_mask.any(1, keepdim=True)
    alive = key_mask.gather(1, order[:, 0, :, 0])
    return Tokens(grouped, key.double(), value.double(), alive, at.clamp(min=0), sees.unsqueeze(1))


def _lost_rows(den: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Refuse rows whose normaliser is not far above what the transforms round; a graph, which cannot, gets them."""
    tolerance = math.sqrt(torch.finfo(dtype).eps)
    lost = noise > tolerance * den.detach().abs()
    if is_traced(lost):
        return lost
    if not bool(lost.any()):
        return None
    worst = float((noise / den.detach().abs())[lost].max())
    raise ValueError(
        f"rounding may change {int(lost.sum())} of {lost.numel()} rows by {worst:.1g} of themselves: their normalisers "
        "are too small beside the largest sums of their features for a Fourier transform, which rounds relative to "
        "those; normalise q and k, narrow the range of the bias, or use FixedDecay, which needs no transform"
    )


def _check_call(query: Tensor, key: Tensor, feature_map: FeatureMap) -> None:
    """Refuse maps and lengths that transforms do not serve."""
    if isinstance(feature_map, GroupedFeatureMap):
        raise ValueError(
            f"a relative bias needs weights that are one sum over features, got {type(feature_map).__name__}, whose "
            "queries read one group of them each; use FavorPlus, or any map without groups"
        )
    if query.shape[2] > key.shape[2]:
        raise ValueError(
            f"a relative bias needs no more queries than keys, got {query.shape[2]} and {key.shape[2]}; the queries "
            "are the last tokens of the keys' sequence"
        )


def _checked_bias(bias: Tensor, query: Tensor, key: Tensor, *, is_causal: bool) -> Tensor:
    """The bias as (Hkv or 1, Hb, n); what does not fit is refused."""
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"bias must be a floating tensor, one number for each distance, got {got}")
    heads, kv_heads, length = query.shape[1], key.shape[1], key.shape[2]
    needed = length if is_causal else 2 * length - 1
    wanted = "distances 0 to M - 1" if is_causal else "distances 1 - M to M - 1, 2M - 1 of them"
    if bias.ndim != 2 or bias.shape[0] not in (1, kv_heads, heads) or not (is_causal or bias.shape[1] % 2):
        raise ValueError(f"bias must be (heads, {wanted}) with 1, {kv_heads} or {heads} heads, got {tuple(bias.shape)}")
    if bias.shape[1] < needed:
        raise ValueError(
            f"{length} tokens need biases for {needed} distances, got {bias.shape[1]}; train a longer table, or repeat "
            "its ends"
        )
    return bias.unsqueeze(1) if bias.shape[0] in (1, kv_heads) else bias.unflatten(0, (kv_heads, -1))
