"""Exact softmax attention: what the maps are measured against and combined with; letters as in softmax/__init__.py."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.softmax.checking import KeyWeights, Qkv, checked, checked_scale, refuse_sdpa_options
from linattn.softmax.partial import Partial, joined, shares
from linattn.softmax.precision import accumulation_dtype, outside_autocast
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import has_tangents, is_traced, is_transformed

# Weights held at once.
_CHUNK = 2**22


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Exact softmax attention, by torch's scaled_dot_product_attention, under this library's conventions.

        out_i = Σ_j exp(scale · q_i·k_j + b_j) v_j / Σ_j exp(scale · q_i·k_j + b_j)

    O(Lq·Lk·(D + Dv)) time; memory as torch's chosen kernel, O(Lq·Lk) where a mask is needed.

    Args:
        query, key, value, key_mask, key_bias, is_causal, enable_gqa: as in `linear_attention`; a bias is added to the
            logits of its key's column, causality is bottom-right (SDPA's own flag is top-left). Jagged ones are taken
            where nothing is masked, biased or causal.
        scale: the factor on q·k, a number, default D**-0.5; multiply the query by a factor that is a tensor.
        attn_mask, dropout_p: SDPA's; another value than its default is refused, with what to give in its place.

    Returns:
        (B, H, Lq, Dv) in the query's dtype.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes, as in `linear_attention`; `attn_mask` or `dropout_p`; a `scale`
            that is no finite number.

    Example:
        >>> import math, torch
        >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3.0)]]]])
        >>> round(softmax_attention(q, k, torch.tensor([[[[8.0], [4.0]]]]), scale=1.0).item(), 4)
        5.0

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    """
    refuse_sdpa_options(attn_mask, dropout_p)
    scale = checked_scale(scale)
    tokens, takes_jagged = (query, key, value), not is_causal and key_mask is None and key_bias is None
    query, key, value, bias = checked(tokens, key_mask, key_bias, enable_gqa=enable_gqa, takes_jagged=takes_jagged)
    with outside_autocast(query.device):
        return _by_sdpa((query, key, value), bias, (key_mask, key_bias), scale, is_causal=is_causal, gqa=enable_gqa)


def softmax_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Partial:
    """Exact softmax attention with its log-normaliser, to be combined with attention over other keys.

        log_normalizer_i = log Σ_j exp(scale · q_i·k_j + b_j)

    O(Lq·Lk·(D + Dv)) time and O(Lq·Lk) memory: meant for the few keys that are treated exactly. Sums run in at least
    float32. Arguments and errors are those of `softmax_attention`.

    Returns:
        Partial(out, log_normalizer): (B, H, Lq, Dv) in the query's dtype and (B, H, Lq) in at least float32.

    Example:
        >>> import math, torch
        >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3.0)]]]])
        >>> part = softmax_partial(q, k, torch.tensor([[[[8.0], [4.0]]]]), scale=1.0)
        >>> round(part.log_normalizer.exp().item(), 4)
        4.0
    """
    scale = checked_scale(scale)
    query, key, value, bias = checked((query, key, value), key_mask, key_bias, enable_gqa=enable_gqa)
    k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in inert(bias, key, value))
    logits = _logit_bias(query, key, bias, is_causal=is_causal)
    with outside_autocast(query.device):
        return softmax_rows(query, k, v, logits, query.shape[-1] ** -0.5 if scale is None else scale)


def _by_sdpa(
    tokens: Qkv, bias: Tensor | None, weights: KeyWeights, scale: float | None, *, is_causal: bool, gqa: bool
) -> Tensor:
    """`softmax_attention` of checked tokens, with the biases that their weights make, through torch's kernels."""
    query, key, value = tokens
    lq, lk = query.shape[2], key.shape[2]
    # Under torch.func kernels take biases for constants.
    if has_tangents() or (weights[1] is not None and is_transformed()):
        return softmax_partial(query, key, value, key_bias=bias, is_causal=is_causal, scale=scale, enable_gqa=gqa).out
    attend = partial(torch.nn.functional.scaled_dot_product_attention, scale=scale, enable_gqa=gqa)
    # By a scale that is not positive torch's kernels make NaN of what their own masks hide.
    is_masked = bias is None and is_causal and (scale is None or scale > 0)
    if is_masked and lq == lk:
        return attend(query, key, value, is_causal=True)
    if is_masked and 0 < lq < lk and not is_traced(*tokens):
        # Imported here: it imports torch's compiler, which does not know it.
        from torch.nn.attention.bias import causal_lower_right

        return attend(query, key, value, attn_mask=causal_lower_right(lq, lk))
    key, value = inert(bias, key, value)
    logits = _logit_bias(query, key, bias, is_causal=is_causal)
    if weights[1] is None:
        mask = None if logits is None else (logits != -torch.inf).expand(*logits.shape[:-2], lq, -1)
        return attend(query, key, value, attn_mask=mask)
    # SDPA wants biases in the query's dtype: 16 bits would round them.
    q, k, v = (x.to(accumulation_dtype(x.dtype)) for x in (query, key, value))
    return attend(q, k, v, attn_mask=logits).to(query.dtype)


def softmax_rows(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, soft_cap: float | None = None
) -> Partial:
    """Rows (..., n, Dv) over keys (..., K, D) and values, in at least float32; 0 where every bias is -inf."""
    dtype = accumulation_dtype(query.dtype)
    logits = soft_capped((query.to(dtype) * scale) @ key.to(dtype).mT, soft_cap)
    weights, log_normalizer = shares(logits if bias is None else logits + bias, -1)
    return Partial((weights @ value.to(dtype)).to(query.dtype), log_normalizer)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """c·tanh(x / c) of logits x, before biases and masks are added; x where there is no cap."""
    return logits if cap is None else cap * (logits / cap).tanh()


def inert(bias: Tensor | None, *tokens: Tensor) -> tuple[Tensor, ...]:
    """Tokens (B, H, L, ·) of bias (B, H or 1, L) -inf replaced by 0, so that what they hold reaches no product."""
    if bias is None:
        return tokens
    return tuple(x.masked_fill((bias == -torch.inf).unsqueeze(-1), 0) for x in tokens)


def causal_mask(num_queries: int, num_keys: int, device: torch.device, span: int = 0) -> Tensor:
    """Which keys each query sees (Lq, Lk), the last of both level; with a span those of earlier spans."""
    if span:
        number = torch.arange(num_keys, device=device) // span
        return number.unsqueeze(-1) > number
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def _logit_bias(query: Tensor, key: Tensor, bias: Tensor | None, *, is_causal: bool) -> Tensor | None:
    """A bias on the logits, -inf for unseen keys, broadcasting to (B, H, Lq, Lk); None for nothing."""
    if bias is not None and bias.shape[1] > 1:
        bias = bias.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if not is_causal:
        return None if bias is None else bias.unsqueeze(2)
    visible = causal_mask(query.shape[2], key.shape[2], query.device)
    zero = query.new_zeros((), dtype=accumulation_dtype(query.dtype))
    return torch.where(visible, zero if bias is None else bias.unsqueeze(2), -torch.inf)


class Scoring(NamedTuple):
    """How a query and a key make a logit: x = scale·q·k, or c·tanh(x / c) where there is a soft cap c."""

    scale: float
    soft_cap: float | None = None

    def biased(self, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Biases plus the logits of products of matrices (N, ·, ·), of which one holds the queries."""
        if self.soft_cap is None:
            return torch.baddbmm(bias, left, right, alpha=self.scale)
        return bias + soft_capped(self.scale * (left @ right), self.soft_cap)


class Reading(NamedTuple):
    """Outputs of rows, and their log-normalisers where they were asked for."""

    out: Tensor  # (B, H, G, L, Dv)
    log_normalizer: Tensor | None  # (B, H, G, L)

    @classmethod
    def joined(cls, parts: list[Reading]) -> Reading:
        """Readings of consecutive rows as one."""
        logs = [part.log_normalizer for part in parts if part.log_normalizer is not None]
        return cls(torch.cat([part.out for part in parts], 3), torch.cat(logs, 3) if logs else None)

    def partial(self) -> Partial:
        """Convert to a partial result; the log-normalisers must be there."""
        assert self.log_normalizer is not None
        return Partial(self.out, self.log_normalizer)


def read(query: Tensor, tokens: Tokens, scoring: Scoring, *, is_causal: bool, with_log: bool) -> Reading:
    """Rows (B, H, G, n, ·) over weighted keys, causally with the last of both level; 0 where no key is seen."""
    dtype, (groups, number) = tokens.bias.dtype, query.shape[2:4]
    rows = query.flatten(2, 3).to(dtype)
    bias = tokens.bias.unsqueeze(2)
    if is_causal and number > 1:
        bias = torch.where(causal_mask(number, bias.shape[-1], bias.device), bias, -torch.inf)
        bias = bias.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
    key, value = tokens.key.to(dtype), tokens.value.to(dtype)
    # torch's kernels have no cap, tell no log-normaliser, and under torch.func take a bias for a constant.
    if with_log or scoring.soft_cap is not None or is_transformed() or has_tangents():
        part = softmax_rows(rows, key, value, bias, *scoring)
        out, log = part.out, part.log_normalizer.unflatten(2, (groups, number)) if with_log else None
    else:
        mask = bias.expand(*rows.shape[:3], -1)
        out, log = torch.nn.functional.scaled_dot_product_attention(rows, key, value, mask, scale=scoring.scale), None
    return Reading(out.to(query.dtype).unflatten(2, (groups, number)), log)


def attend_to_all(query: Tensor, tokens: Tokens, scale: float, soft_cap: float | None = None) -> Partial:
    """Exact rows (B, H, G, L, ·) over the same few tokens."""
    size = max(_CHUNK // max(query.shape[:3].numel() * tokens.key.shape[2], 1), 1)
    key, value, bias = tokens.key.unsqueeze(2), tokens.value.unsqueeze(2), tokens.bias[:, :, None, None]
    return joined([softmax_rows(rows, key, value, bias, scale, soft_cap) for rows in query.split(size, 3)])
