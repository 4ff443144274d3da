"""Who sees whom exactly: windows and the running choice of heavy keys, key by key and query by query.

Letters: B batch, H key/value heads, G query heads of each, N queries, M keys, w tokens of a
window's block, g heavy keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.machine import unit


def causal(places: Tensor, num_keys: int) -> Tensor:
    """(N, M): whether a query at this place sees a key, at its own place at the latest."""
    return torch.arange(num_keys) <= places.unsqueeze(-1)


def near(places: Tensor, num_keys: int, window: int, *, is_causal: bool) -> Tensor:
    """(N, M): whether a key is in the query's own block or a neighbouring one; causally the one before."""
    apart = (places // window).unsqueeze(-1) - torch.arange(num_keys) // window
    return (apart >= 0) & (apart <= 1) & causal(places, num_keys) if is_causal else apart.abs() <= 1


class Heavy(NamedTuple):
    """The heavy keys of each query, and those of a query after all keys.

    Attributes:
        seen: (B, H, N, M).
        last: (B, H, M), at the end of the stream.
        unclear: (B, H, N): whether rounding decided the choice, or one before it.
        last_unclear: (B, H).
    """

    seen: Tensor
    last: Tensor
    unclear: Tensor
    last_unclear: Tensor


def heavy_so_far(
    query: Tensor,  # (B, H, G, N, D)
    key: Tensor,  # (B, H, M, D), masked ones 0
    live: Tensor,  # (B, M)
    places: Tensor,  # (N,), the queries' places among the keys
    window: int,
    count: int,
    scale: float,
    rounding: torch.dtype,
) -> Heavy:
    """As a block begins, the keys of the block before the last leave the neighbourhood; the best of them and of the
    heavy ones so far stay: a key's score is its mean weight in the softmax over the neighbourhoods that it was in.
    """
    batch, heads, num_keys = key.shape[:3]
    visible = near(places, num_keys, window, is_causal=True) & live[:, None, None, None]
    logits = torch.where(visible, scale * query @ key.mT.unsqueeze(2), -torch.inf)
    mass = torch.softmax(logits, -1).nan_to_num(0).sum((2, 3)) if num_keys else key.new_zeros(batch, heads, 0)
    size = float((scale * query.abs() @ key.abs().mT.unsqueeze(2)).max()) if logits.numel() else 0.0
    band = 64 * unit(rounding) * (num_keys + query.shape[3] + (query.shape[-1] + 8) * size)
    seen = torch.zeros(batch, heads, len(places), num_keys, dtype=torch.bool)
    unclear = torch.zeros(batch, heads, len(places), dtype=torch.bool)
    last, last_unclear = torch.zeros_like(mass, dtype=torch.bool), torch.zeros(batch, heads, dtype=torch.bool)
    floor = 0.0 if rounding == torch.float64 else 1e-30
    blocks = places // window
    for b in range(batch):
        for h in range(heads):
            score = [float(mass[b, h, j]) / (2 * window - j % window) for j in range(num_keys)]
            chosen: list[int] = []
            doubtful = False
            for number in range(2, -(-num_keys // window)):
                leaving = [j for j in range((number - 2) * window, (number - 1) * window) if live[b, j]]
                chosen = sorted(chosen + leaving, key=lambda j: -score[j])
                doubtful |= _is_close([score[j] for j in chosen], count, band, floor)
                chosen = chosen[:count]
                for i in (blocks == number).nonzero().flatten().tolist():
                    seen[b, h, i, chosen] = True
                    unclear[b, h, i] = doubtful
            last[b, h, chosen], last_unclear[b, h] = True, doubtful
    return Heavy(seen, last, unclear, last_unclear)


def _is_close(scores: list[float], count: int, band: float, floor: float) -> bool:
    """Whether rounding may exchange the last one kept and the first one left, scores falling."""
    if not 0 < count < len(scores):
        return False
    kept, left = scores[count - 1 : count + 1]
    return max(kept, floor) * (1 - band) <= max(left, floor) and kept > (0.0 if floor == 0 else -1.0)


def heaviest(mass: Tensor, error: Tensor, live: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The keys of the largest column mass (B, H, M) among the live (B, M), and where rounding decides (B, H)."""
    num_keys = mass.shape[-1]
    unclear = torch.zeros(mass.shape[:2], dtype=torch.bool)
    if num_keys == 0 or count == 0:
        return torch.zeros_like(mass, dtype=torch.bool), unclear
    mass = torch.where(live[:, None], mass, -torch.inf)
    order = mass.argsort(-1, descending=True)
    chosen = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order[..., :count], True) & live[:, None]
    if count < num_keys:
        around = order[..., count - 1 : count + 1]
        kept, left = mass.gather(-1, around).unbind(-1)
        slack = error.amax(-1)
        unclear = ~(kept - left > slack) & (left > -torch.inf)
    return chosen, unclear
