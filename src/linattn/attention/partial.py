"""Partial results of attention over some of the keys, and how they combine exactly.

Letters: B batch, H heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends import Backend, Call, Rows, regular
from linattn.attention.sums import Sums


class Partial(NamedTuple):
    """Attention over some of the keys: the normalised output and the logarithm of its normaliser.

    out_i = Σ_j w_ij v_j / Σ_j w_ij and log_normalizer_i = log Σ_j w_ij, FlashAttention's LSE.

    Attributes:
        out: (B, H, Lq, Dv), in the inputs' dtype; 0 where no key was seen.
        log_normalizer: (B, H, Lq), float32 or float64, in nats; -inf where no key was seen, NaN where a signed map's
            normaliser is negative.
    """

    out: Tensor
    log_normalizer: Tensor

    def ungrouped(self) -> Partial:
        """The same with query heads in one dimension: (B, Hkv, G, …) -> (B, H, …)."""
        return Partial(self.out.flatten(1, 2), self.log_normalizer.flatten(1, 2))


def combine(*partials: Partial) -> Partial:
    """Combine partial results over disjoint sets of keys into the result over all of them.

        out = Σ_p exp(n_p - n) out_p,   n = log Σ_p exp(n_p)

    Exact, and associative, whichever kernels produced the parts, exact softmax included, as long as each part's
    weights are on the same scale: maps with `softmax_kernel` and `softmax_partial` are on that of exp(scale · q·k).
    Nothing is subtracted, so parts with small normalisers lose no digits. Cost O(P·Lq·Dv) for P parts. Parts of an
    `Expansion` are each expanded around the mean of their own keys: together they are not the expansion of the whole.

    Args:
        *partials: at least one; `out` (B, H, Lq, Dv) and `log_normalizer` (B, H, Lq) of the same shapes. The sets of
            keys must be disjoint: a key seen by two parts counts twice.

    Returns:
        The partial result over the union of the keys; rows that saw no key in any part stay 0 with -inf.

    Raises:
        ValueError: no partial was given, or their shapes differ.

    Example:
        >>> import torch
        >>> seen = Partial(torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]]))
        >>> other = Partial(torch.tensor([[[[4.0]]]]), torch.log(torch.tensor([[[2.0]]])))
        >>> combine(seen, other).out.item()
        3.0

    Source: Dao et al. 2022 (FlashAttention, arXiv 2205.14135), section 3.1; Chen et al. 2021 (Scatterbrain, arXiv
        2110.15343) for an exact part beside a kernel part.
    """
    if not partials:
        raise ValueError("combine needs at least one Partial, got none")
    shapes = {(tuple(p.out.shape), tuple(p.log_normalizer.shape)) for p in partials}
    if len(shapes) > 1:
        raise ValueError(
            f"combine needs partials of one shape, got (out, log_normalizer) of {sorted(shapes)}; "
            "read the parts with the same queries"
        )
    logs = torch.stack([p.log_normalizer for p in partials])
    peak = logs.detach().amax(0)
    # Rows that saw nothing have peak -inf; any finite reference serves them.
    peak = torch.where(peak == -torch.inf, 0, peak)
    weights = torch.exp(logs - peak)
    total = weights.sum(0)
    # Guarded, so that rows that saw nothing have gradient 0 instead of NaN.
    dead = total == 0
    safe_total = torch.where(dead, 1, total)
    shares = weights / safe_total
    out = shares[0].unsqueeze(-1) * partials[0].out.to(shares.dtype)
    for share, part in zip(shares[1:], partials[1:], strict=True):
        out = torch.addcmul(out, share.unsqueeze(-1), part.out.to(shares.dtype))
    log_normalizer = torch.where(dead, -torch.inf, torch.log(safe_total) + peak)
    return Partial(out.to(partials[0].out.dtype), log_normalizer)


def as_partial(call: Call, rows: Rows) -> Partial:
    """The rows (B, H, G, L, …) of a call as a partial result of that shape, on the kernel's true scale."""
    # The guarded logarithm keeps the gradient of rows that saw no key at 0 instead of NaN.
    log_normalizer = torch.where(rows.den == 0, -torch.inf, regular(rows.den).log() + rows.reference)
    weight = call.bound.query_log_weight(call.query.to(rows.den.dtype))
    return Partial(rows.out, log_normalizer if weight is None else log_normalizer + weight)


def map_rows(call: Call, backend: Backend, before: Sums, *, span: int = 0) -> tuple[Partial, Sums]:
    """`Backend.attend` with its rows as a partial result."""
    rows, after = backend.attend(call, before, span=span)
    return as_partial(call, rows), after


def joined(parts: list[Partial]) -> Partial:
    """Partial results of consecutive rows as one."""
    return Partial(torch.cat([p.out for p in parts], 3), torch.cat([p.log_normalizer for p in parts], 3))
