"""Rows between padding, beside a longer one and one of padding alone.

Letters: B batch, L tokens, Hkv key/value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grid import qkv

REAL, PADDED = 61, 97
PLACES = {
    "right": torch.arange(REAL),
    "left": torch.arange(PADDED - REAL, PADDED),
    "interior": torch.randperm(PADDED, generator=torch.Generator().manual_seed(5))[:REAL].sort().values,
}
FILLINGS = {"zero": 0.0, "other": 3.0, "nan": torch.nan}


def padded(place: str, filling: float, groups: int = 2, **options: object) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Real tokens alone, the same between padding beside a longer row and one without any, and the mask."""
    real = list(qkv(batch=1, heads=2 * groups, num_queries=REAL, num_keys=REAL, **options))
    others = qkv(heads=2 * groups, num_queries=PADDED, num_keys=PADDED, seed=9, **options)
    full = []
    for x, other in zip(real, others, strict=True):
        room = torch.full_like(other[:1], filling)
        room[:, :, PLACES[place]] = x
        full.append(torch.cat((room, other)))
    mask = torch.zeros(3, PADDED, dtype=torch.bool)
    mask[0, PLACES[place]] = True
    mask[1] = True
    return real, full, mask


def weights(how: str, mask: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A mask as one, or as a bias of all key/value heads or of each."""
    if how == "mask":
        return {"key_mask": mask}
    bias = torch.where(mask, 0.0, -torch.inf).to(dtype).unsqueeze(1)
    return {"key_bias": bias if how == "bias" else bias.expand(-1, 2, -1)}
