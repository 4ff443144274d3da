"""The truth: every weight formed in float64, and how far a correct result may be from it.

Letters: B batch, H query heads, Hkv key/value heads, G = H/Hkv, N queries, M keys, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.machine import sums_dtype, unit
from fuzzing.weights import Noise, Weigher

# Beyond this relative error of its normaliser nothing is known of a row's value.
LARGEST_ERROR = 0.05


class MismatchError(AssertionError):
    """A result that is not the oracle's."""


class Part(NamedTuple):
    """Keys that one kernel takes.

    Attributes:
        weigher: the kernel.
        visible: which of them each query sees, broadcasting to (B, Hkv, G, N, M).
        bias: what their exponents are raised by, broadcasting likewise.
    """

    weigher: Weigher
    visible: Tensor
    bias: Tensor | None = None


class Rows(NamedTuple):
    """Attention of each query over all parts, and the bounds of its error."""

    out: Tensor  # (B, H, N, Dv)
    log_normalizer: Tensor  # (B, H, N)
    weights: Tensor  # (B, H, N, M), which sum to 1
    shares: Tensor  # the same over a normaliser that is a constant for gradients
    out_error: Tensor  # (B, H, N, Dv)
    log_error: Tensor  # (B, H, N)
    weights_error: Tensor  # (B, H, N, M)
    dead: Tensor  # (B, H, N): no key is seen, or only keys whose every product of features is 0
    known: Tensor  # (B, H, N): whether the bounds are small, and no choice was left to rounding
    relative: Tensor  # (B, H, N), error of the normaliser
    largest: float  # value


def attend(parts: Sequence[Part], query: Tensor, key: Tensor, value: Tensor, *, noise: Noise | None = None) -> Rows:
    """Queries (B, H, N, D) over keys (B, Hkv, M, D) and values in float64, masked ones 0 and in no part."""
    heads = key.shape[1]
    grouped = query.unflatten(1, (heads, -1))
    full = torch.zeros(*grouped.shape[:4], key.shape[2], dtype=torch.bool)
    found = [(part.weigher.weigh(grouped, key, part.visible, noise, part.bias), part.visible | full) for part in parts]
    logs = [torch.where(seen, w.exponent + w.row_exponent, -torch.inf) for w, seen in found]
    # A part whose coefficients are 0 must not hide another one.
    sizes = [x.detach() + torch.log(w.coefficient.detach().abs()) for x, (w, _) in zip(logs, found, strict=True)]
    peak = torch.stack([_peak(x) for x in sizes]).amax(0)
    peak = torch.where(peak == -torch.inf, 0, peak).unsqueeze(-1)
    shares = [torch.exp(x - peak) for x in logs]
    weights = sum(share * w.coefficient for share, (w, _) in zip(shares, found, strict=True))
    error = sum(share.detach() * w.error for share, (w, _) in zip(shares, found, strict=True))
    den = weights.sum(-1)
    if noise is not None:
        # Numerator and normaliser are rounded apart.
        weights = weights + noise(weights, error + noise.outputs * weights.detach().abs())
        value = value * (1 + noise(value, max(noise.outputs, unit(parts[0].weigher.rounding))))
    wide = value.unsqueeze(2)
    out = weights @ wide / torch.where(den == 0, 1, den).unsqueeze(-1)
    # Sparse maps: a query that overlaps no key has no weight at all.
    dead = ((weights == 0) & (error < 1e-30)).all(-1) if weights.shape[-1] else torch.ones_like(den, dtype=torch.bool)
    unclear = torch.stack([w.ambiguous & seen.any(-1) for w, seen in found]).any(0)
    dead = dead & ~unclear | ~torch.stack([seen.any(-1) for _, seen in found]).any(0)
    out = torch.where(dead.unsqueeze(-1), 0, out)
    whole = torch.where(den == 0, 1, den)
    safe = torch.where(dead, 1, den.detach()).abs()
    relative = error.sum(-1) / safe
    spread = error @ wide.abs() + error.sum(-1, keepdim=True) * out.detach().abs()
    log = torch.log(torch.where(den > 0, den, 1)) + peak.squeeze(-1)
    log = torch.where(dead, -torch.inf, torch.where(den > 0, log, torch.nan))
    rounding = parts[0].weigher.rounding
    size = torch.stack(
        [_peak(torch.where(seen, x.detach().abs(), 0)) for x, (_, seen) in zip(logs, found, strict=True)]
    )
    log_error = 2 * relative + 8 * unit(rounding) * (1 + size.amax(0) + log.detach().abs().nan_to_num(0, 0, 0))
    known = (relative < LARGEST_ERROR) & ~unclear | dead
    rows, shares = weights / whole.unsqueeze(-1), weights / whole.detach().unsqueeze(-1)
    rows_error = (error + rows.detach().abs() * error.sum(-1, keepdim=True)) / safe.unsqueeze(-1)
    flat = (
        out,
        log,
        rows,
        shares,
        spread / safe.unsqueeze(-1),
        log_error,
        rows_error,
        dead,
        known,
        torch.where(known & ~dead, relative, 0),
    )
    return Rows(*(x.flatten(1, 2) for x in flat), float(value.detach().abs().max()) if value.numel() else 0.0)


def _peak(x: Tensor) -> Tensor:
    """The largest number of each row, -inf where there is none."""
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)


def check_out(found: Tensor, rows: Rows, dtype: torch.dtype, name: str, *, roundings: int = 1) -> None:
    """Refuse an output that is further from the truth than rounding explains.

    Args:
        found: (B, H, N, Dv).
        rows: the truth.
        dtype: the inputs'.
        name: what to call it.
        roundings: how often it is rounded to that dtype on its way.
    """
    found = found.detach()
    _check_form(found, rows.out, dtype, name)
    size = rows.out.detach().abs()
    band = rows.out_error + _rounding(size + (roundings > 1) * rows.largest, dtype, roundings)
    band = torch.where(size + band > torch.finfo(dtype).max, torch.inf, band)
    check_close(found, rows.out.detach(), torch.where(rows.known.unsqueeze(-1), band, torch.inf), name)
    _check_zero(found, rows.dead, name)


def check_log(found: Tensor, rows: Rows, dtype: torch.dtype, name: str) -> None:
    """The same for log-normalisers (B, H, N): -inf where no key is seen, NaN where a signed normaliser is negative."""
    found = found.detach()
    _check_form(found, rows.log_normalizer, sums_dtype(dtype), name)
    truth, finite = rows.log_normalizer.detach(), rows.log_normalizer.isfinite()
    check_close(found, torch.where(finite, truth, 0), torch.where(finite & rows.known, rows.log_error, torch.inf), name)
    wrong = rows.dead & (found != -torch.inf) | (rows.known & truth.isnan() & ~found.isnan())
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise MismatchError(
            f"{name}: at {place} found {float(found[tuple(place)])}, wanted {float(truth[tuple(place)])}"
        )


def check_close(found: Tensor, truth: Tensor, band: Tensor, name: str) -> None:
    """Refuse numbers outside their bands; an infinite band admits everything."""
    found, truth, band = found.detach().double(), truth.detach(), band.detach()
    wrong = ~((found - truth).abs() <= band) & (band < torch.inf)
    if not wrong.any():
        return
    off = torch.where(wrong, ((found - truth).abs() / band.clamp(min=1e-300)).nan_to_num(torch.inf), 0)
    place = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
    a, b, c = (float(x.expand(off.shape)[tuple(place)]) for x in (found, truth, band))
    count = f"{int(wrong.sum())} of {wrong.numel()}"
    raise MismatchError(f"{name}: at {place} found {a!r}, wanted {b!r}, {abs(a - b):.3g} > {c:.3g} ({count} wrong)")


def check_same(found: Tensor, truth: Tensor, name: str) -> None:
    """Refuse anything but the same bits."""
    if found.shape != truth.shape or found.dtype != truth.dtype:
        raise MismatchError(f"{name}: {tuple(found.shape)} {found.dtype}, wanted {tuple(truth.shape)} {truth.dtype}")
    found, truth = found.detach(), truth.detach()
    if not ((found == truth) | (found.isnan() & truth.isnan())).all():
        raise MismatchError(f"{name}: bits differ by up to {float((found - truth).abs().nan_to_num(0).max()):.3g}")


def _check_form(found: Tensor, truth: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse another shape or dtype."""
    if found.shape != truth.shape or found.dtype != dtype:
        raise MismatchError(f"{name}: {tuple(found.shape)} {found.dtype}, wanted {tuple(truth.shape)} {dtype}")


def _check_zero(found: Tensor, dead: Tensor, name: str) -> None:
    """Refuse anything but 0 where no key is seen."""
    wrong = (found != 0) & dead.unsqueeze(-1)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise MismatchError(f"{name}: at {place} found {float(found[tuple(place)])} where no key is seen, wanted 0")


def _rounding(size: Tensor, dtype: torch.dtype, roundings: int) -> Tensor:
    """So many roundings of numbers of this size."""
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return 2 * roundings * (unit(dtype) * size + smallest)
