"""Queries, keys, values and masks: every size, scale, precision and layout that the contract allows.

Letters: B batch, H query heads, Hkv key/value heads, G = H/Hkv, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzzing.dice import Dice

DTYPES = {torch.float64: 0.6, torch.float32: 0.2, torch.bfloat16: 0.1, torch.float16: 0.1}
# Rises of a key's exponent over those before it, around the limits of float32 and of the jump guard.
JUMPS = (5.0, 30.0, 58.0, 59.0, 60.0, 61.0, 70.0, 80.0, 84.0, 87.0, 89.0, 104.0, 150.0, 300.0, 700.0, 746.0)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call."""

    batch: int
    kv_heads: int
    groups: int
    head_dim: int
    value_dim: int

    @property
    def heads(self) -> int:
        """H."""
        return self.kv_heads * self.groups


def draw_sizes(dice: Dice) -> Sizes:
    """Small ones, B and Dv sometimes 0."""
    return Sizes(
        0 if dice.chance(0.03) else dice.pick(1, 2, 2, 3),
        dice.pick(1, 2, 2),
        dice.pick(1, 1, 2, 3),
        dice.pick(1, 2, 3, 4, 4, 8),
        0 if dice.chance(0.03) else dice.pick(1, 2, 3, 5),
    )


def draw_vectors(dice: Dice, shape: tuple[int, int, int, int], dtype: torch.dtype, *, tame: bool = False) -> Tensor:
    """Queries or keys (B, H, L, D): from tiny to huge, alike, apart, with one far above the others."""
    x = dice.normal(*shape)
    length, dim = shape[2:]
    pattern = dice.weighted(
        {"plain": 3.0}
        if tame
        else {
            "plain": 4.0,
            "huge": 0.7,
            "outlier": 1.0,
            "mixed": 1.0,
            "jump": 1.5,
            "equal": 0.3,
            "zero": 0.2,
            "drift": 0.6,
        }
    )
    tiny = 1e-8 if dtype == torch.float64 else 1e-3
    if pattern == "plain":
        x = x * dice.pick(0.3, 0.7, 1.0, 1.5, 3.0, *(() if tame else (tiny, 1e-2)))
    elif pattern == "huge":
        x = x * dice.pick(10.0, 30.0, 300.0)
    elif pattern == "mixed":
        x = x * torch.exp(dice.normal(shape[0], shape[1], length, 1) * 2).clamp(max=300.0)
    elif pattern == "equal":
        x = x[:, :, :1].expand(shape) if length else x
    elif pattern == "zero":
        x = x * 0
    elif pattern == "drift":
        x = 0.5 * x + 3 * dice.normal(1, 1, 1, dim)
    elif length:
        place = dice.integer(0, length - 1)
        x = x * dice.pick(0.1, 1.0)
        if pattern == "outlier":
            x[:, :, place] *= dice.pick(30.0, 300.0)
        else:
            # A step of all coordinates of a token, or of it and all later ones.
            where = slice(place, place + 1) if dice.chance(0.6) else slice(place, None)
            x[:, :, where] += (
                dice.pick(-1.0, 1.0, 1.0) * dice.pick(*JUMPS) * dice.pick(1.0, 1 / math.sqrt(dim), dim**0.5)
            )
    return x.to(dtype)


def draw_values(dice: Dice, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Values (B, Hkv, Lk, Dv)."""
    x = dice.normal(*shape)
    return (torch.ones_like(x) if dice.chance(0.05) else x * dice.pick(1.0, 1.0, 1.0, 1e-3, 1e3)).to(dtype)


def draw_mask(dice: Dice, batch: int, length: int, *, share: float = 0.5) -> Tensor | None:
    """A key mask (B, Lk), or none: padding left, right or anywhere, all of a row or of all rows."""
    if not dice.chance(share):
        return None
    kind = dice.weighted({"any": 4.0, "left": 1.5, "right": 1.5, "row": 1.0, "all": 0.3, "nobody": 0.5})
    places, cuts = torch.arange(length), torch.tensor([dice.integer(0, length) for _ in range(batch)]).view(-1, 1)
    if kind == "any":
        return dice.flags(batch, length, share=dice.pick(0.2, 0.7, 0.9))
    if kind == "left":
        return places.expand(batch, -1) >= cuts
    if kind == "right":
        return places.expand(batch, -1) < cuts
    mask = torch.full((batch, length), kind != "all")
    if kind == "row" and batch:
        mask[dice.integer(0, batch - 1)] = False
    return mask


def draw_bias(dice: Dice, batch: int, heads: int, length: int) -> Tensor:
    """A key bias (B, H or 1, Lk): 0, a distance's, gates that close, or numbers alike from tiny to large."""
    x = dice.normal(batch, dice.pick(1, heads), length)
    kind = dice.weighted({"zero": 0.5, "any": 3.0, "falling": 1.0, "rising": 2.0, "level": 1.0})
    if kind == "zero":
        return x * 0
    if kind == "any":
        return x * dice.pick(1e-3, 1.0, 5.0)
    if kind == "level":
        return x + dice.pick(-300.0, 300.0)
    steps = x.abs() * dice.pick(0.1, 1.0)
    # No key is further than this below another: products with features that no other key has are lost there.
    rising = steps.cumsum(-1).clamp(max=40.0)
    return rising if kind == "rising" else -rising


def fill_masked(dice: Dice, x: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens (B, Hkv, L, ·) with anything at all where they are masked."""
    filling = dice.pick(None, float("nan"), float("inf"), -float("inf"), 1e4)
    if mask is None or filling is None:
        return x
    return torch.where(mask[:, None, :, None], x, filling).to(x.dtype)


def without_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """The same with zeros there."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, torch.zeros_like(x))


def laid_out(dice: Dice, x: Tensor) -> Tensor:
    """The same numbers in another layout of memory."""
    layout = dice.weighted({"plain": 6.0, "tokens first": 2.0, "wider": 1.0, "reversed": 1.0})
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "wider":
        return torch.cat((x, torch.full_like(x, float("nan"))), -1)[..., : x.shape[-1]]
    return x.mT.contiguous().mT if layout == "reversed" else x
