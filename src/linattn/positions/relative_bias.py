"""Attention with any relative bias, by Fourier transforms along the sequence; letters as in positions/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linattn.attention.bound_map import BoundMap, bind, check_unchanged
from linattn.attention.checking import checked_for
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.softmax.attention import inert
from linattn.softmax.checking import DTYPES, check_dtype
from linattn.softmax.precision import outside_autocast
from linattn.softmax.tracing import has_values, is_traced, is_transformed

# Numbers of a chunk's transforms held at once, and tokens whose features are computed together.
_CHUNK, _BLOCK = 2**20, 1024


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
            a bias of another shape, for fewer tokens, or with inf or nan; rounding would take half of a row's digits.

    Example:
        >>> import math, torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> x, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[8.0], [2.0]]]])
        >>> near = torch.tensor([[math.log(0.5), 0.0, math.log(0.5)]])
        >>> relative_bias_attention(x, x, v, relu, near).flatten().round(decimals=4).tolist()
        [6.0, 4.0]

    Source: Luo et al. 2021 (arXiv 2106.12566), section 3.2.
    """
    query, key, value, _ = checked_for(feature_map, (query, key, value), key_mask, None, enable_gqa=enable_gqa)
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
    table = _checked_bias(bias, query, key, is_causal=is_causal)
    if not value.numel():  # Libraries of transforms refuse to make none.
        return (query.sum() + key.sum() + value.sum() + table.sum()) * value.new_zeros(*query.shape[:3], value.shape[3])
    bound, query, key = bind(feature_map, query, key, key_mask, is_causal=is_causal)
    with outside_autocast(query.device):
        tokens = _on_a_grid(query, key, value, key_mask, is_causal=is_causal)
        num, den, noise = convolved(Columns(bound, tokens), tokens, Kernel.of(table, key.shape[2], is_causal=is_causal))
        sees = tokens.sees.unsqueeze(-2)
        lost, dead = _lost_rows(den, noise * sees, value.dtype), (den == 0) | ~sees
        out = torch.where(dead.unsqueeze(-1), 0, num / torch.where(dead, 1, den).unsqueeze(-1))
        if lost is not None:
            out = out.masked_fill(lost.unsqueeze(-1), torch.nan)
        if out.requires_grad and not is_traced(out):
            of_now = bound.swapped.fingerprint()
            out.register_hook(lambda _: check_unchanged(bound.swapped, of_now))
    return out.flatten(1, 2).to(value.dtype)


def _on_a_grid(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tokens:
    """The tokens in float64, attended keys moved together; where each query stands among them."""
    query, key = (x.to(torch.float64, copy=True) for x in (query, key))  # Read in backward: others may be written over.
    grouped = query.unflatten(1, (key.shape[1], -1))
    batch, length, num_queries = key.shape[0], key.shape[2], query.shape[2]
    if key_mask is None:
        sees = torch.ones(1, 1, 1, dtype=torch.bool, device=key.device)
        return Tokens(grouped, key, value.double(), None, None, sees)
    dead = torch.where(key_mask, 0.0, -torch.inf).unsqueeze(1)
    order = (~key_mask).to(torch.int8).argsort(dim=1, stable=True)[:, None, :, None]
    key, value = (x.gather(2, order.expand(batch, x.shape[1], -1, x.shape[3])) for x in inert(dead, key, value))
    at = key_mask.cumsum(1)[:, length - num_queries :] - 1
    sees = at >= 0 if is_causal else key_mask.any(1, keepdim=True)
    alive = key_mask.gather(1, order[:, 0, :, 0])
    return Tokens(grouped, key, value.double(), alive, at.clamp(min=0), sees.unsqueeze(1))


def _lost_rows(den: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Refuse rows whose normaliser is not far above what the transforms round; a graph, which cannot, gets them."""
    tolerance = math.sqrt(torch.finfo(dtype).eps)
    lost = noise > tolerance * den.detach().abs()
    if not has_values(lost):
        return lost
    if not bool(lost.any()):
        return None
    worst = float((noise / den.detach().abs())[lost].max())
    raise ValueError(
        f"rounding may change {int(lost.sum())} of {lost.numel()} rows by {worst:.1g} of themselves: their normalisers "
        "are too small beside the largest sums of their features for a Fourier transform, which rounds relative to "
        "those; normalise q and k, narrow the range of the bias, or use FixedDecay, which needs no transform"
    )


def _checked_bias(bias: Tensor, query: Tensor, key: Tensor, *, is_causal: bool) -> Tensor:
    """The bias as (Hkv or 1, Hb, n); what does not fit is refused."""
    check_dtype("bias", bias, DTYPES, "a floating tensor, one number for each distance", "convert it with .float()")
    heads, kv_heads, length = query.shape[1], key.shape[1], key.shape[2]
    needed = length if is_causal else 2 * length - 1
    wanted = "distances 0 to M - 1" if is_causal else "distances 1 - M to M - 1, 2M - 1 of them"
    if bias.ndim != 2 or bias.shape[0] not in (1, kv_heads, heads) or not (is_causal or bias.shape[1] % 2):
        raise ValueError(f"bias must be (heads, {wanted}) with 1, {kv_heads} or {heads} heads, got {tuple(bias.shape)}")
    if bias.shape[1] < needed:
        raise ValueError(
            f"{length} tokens need biases for {needed} distances, got {bias.shape[1]}; train more, or repeat the ends"
        )
    if has_values(bias) and not bool((bias < math.inf).all()):
        raise ValueError("bias must be numbers below infinity, got inf or nan; give numbers")
    return bias.unsqueeze(1) if bias.shape[0] in (1, kv_heads) else bias.unflatten(0, (kv_heads, -1))


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
        gap = bias.new_full((*bias.shape[:-1], length - later.shape[-1] - earlier.shape[-1]), -torch.inf)
        used = torch.cat((later, gap, earlier), -1)
        peak = used.detach().amax(-1, keepdim=True)
        factors = torch.exp(used - torch.where(peak == -torch.inf, 0, peak))
        return cls(torch.fft.rfft(factors), factors.detach().norm(dim=-1), length)


class Columns:
    """Features of a call's tokens, some columns at a time: of keys relative to each feature's largest exponent."""

    def __init__(self, bound: BoundMap, tokens: Tokens) -> None:
        self._map, self._tokens, self.num_features = bound.swapped, tokens, bound.feature_map.num_features
        with torch.no_grad():
            self._peak = self._key_peak()
            if self._map.exponential:
                self._row_peak = self._query_peak()

    def of_keys(self, columns: slice) -> Tensor:
        """(B, H, L, C)."""
        features = self._blocks(self._key_columns, self._tokens.key, columns)
        return features if self._tokens.alive is None else features * self._tokens.alive[:, None, :, None]

    def of_queries(self, columns: slice) -> Tensor:
        """(B, H, G, L, C)."""
        query = self._tokens.query
        return torch.unflatten(self._blocks(self._query_columns, query.flatten(2, 3), columns), 2, query.shape[2:4])

    def _blocks(self, function: Callable[..., Tensor], x: Tensor, columns: slice) -> Tensor:
        """A function of tokens and columns, block by block of tokens; backward computes features again."""
        blocks = (slice(start, start + _BLOCK) for start in range(0, max(x.shape[2], 1), _BLOCK))
        return torch.cat([recomputed(function, x[:, :, at], at, columns) for at in blocks], 2)

    def _key_columns(self, x: Tensor, at: slice, columns: slice) -> Tensor:
        """Features of keys relative to their largest."""
        phi = self._map.key(x)[..., columns]
        if self._map.exponential:
            return torch.exp(phi - self._peak[..., columns])
        return phi * torch.exp(self._key_exponents(x) - self._peak)

    def _query_columns(self, x: Tensor, at: slice, columns: slice) -> Tensor:
        """Features of queries, exponentials relative to the row's largest."""
        phi = self._map.query(x)[..., columns]
        if not self._map.exponential:
            return phi
        return torch.exp(phi + self._peak[..., columns] - self._row_peak[:, :, at])

    def _key_peak(self) -> Tensor:
        """The largest exponent over attended keys of each feature, (B, H, 1, R or 1)."""
        key, alive = self._tokens.key, self._tokens.alive
        highest = key.new_full((*key.shape[:2], 1, self._map.num_exponents), -torch.inf)
        for start in range(0, key.shape[2], _BLOCK):
            at = slice(start, start + _BLOCK)
            exponents = self._key_exponents(key[:, :, at])
            if alive is not None:
                exponents = exponents.masked_fill(~alive[:, None, at, None], -torch.inf)
            highest = torch.maximum(highest, exponents.amax(2, keepdim=True))
        return torch.where(highest == -torch.inf, 0, highest)

    def _query_peak(self) -> Tensor:
        """The largest exponent of each row of queries, (B, H, G·L, 1), of an exponential map."""
        blocks = self._tokens.query.flatten(2, 3).split(_BLOCK, 2)
        return torch.cat([(self._map.query(x) + self._peak).amax(-1, keepdim=True) for x in blocks], 2)

    def _key_exponents(self, x: Tensor) -> Tensor:
        """The exponents of keys, or the logarithms of their weights as one exponent, 0 where they have none."""
        if self._map.exponential:
            return self._map.key(x)
        weight = self._map.key_log_weight(x)
        return x.new_zeros(*x.shape[:-1], 1) if weight is None else weight.unsqueeze(-1)


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
        noise = noise + rounding * faint
    assert total is not None
    return total[..., :-1, :].mT, total[..., -1, :], noise


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), of which backward keeps the arguments alone."""
    if not torch.is_grad_enabled() or is_transformed():  # torch.func refuses checkpoints.
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
    return torch.sum(phi_q * sums, 3)
