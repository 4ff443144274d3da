"""Keys' biases apart from their features, as factors of at most 1; letters as in blocked/__init__.py.

A bias is a part of a key's exponent that all features share, and a gate lets it rise along a text without end. The sums
keep what they are worth apart too, as a level. Within a block rows weigh keys by exp(b_j - e_i) beside features that
know nothing of it, e_i being the largest bias that row i sees: no later key can underflow it. In heads whose biases
rise little, joint ones, the level is raised to the block's last before rows read it: the factor is of keys alone there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Running, coarse, exponential_


class Ways(NamedTuple):
    """How heads take the biases of a block, (B, H) bool each."""

    apart: Tensor  # from features; else within their exponents
    joint: Tensor  # all rows relative to one level


def ways(bias: Tensor, state: Running, c: Tensor, span: int, least: Callable[[], Tensor] | None, limit: float) -> Ways:
    """How biases b (B, H or 1, n) are taken: no row may see the best of its keys by the limit below its own exponent.

    Args:
        bias: b, -inf where masked.
        state: the sums before the block.
        c: the exponent after it, (B, H, R), without biases.
        span: rows see earlier spans of so many keys only, if not 0.
        least: tells by how much a feature may be below c, (B, H), negative; None for maps without exponents.
        limit: of the difference of exponents.
    """
    last = last_level(bias, state.level)
    rise, z = (last - state.level).squeeze(-1), state.z.unflatten(0, c.shape[:2])
    fall = rise.new_zeros(()) if least is None else (c - state.m - z.log()).amax(-1)
    # All rows see the sums, which fade little.
    held = fall + rise < limit
    if bool(held.all()):
        return Ways(held, held)
    depth = fall if least is None else -least()
    # Or all keys are near c, of which a row sees the one of its largest bias best; it waits for no sums of no key.
    apart = held | ((depth < limit) & ((fall < limit) | (z == 0).all(-1)))
    spread = (last - bias).amax(-1)
    return Ways(apart, held if span else held | (apart & (spread + depth < limit)))


def last_level(bias: Tensor, level: Tensor) -> Tensor:
    """The level (B, H, 1) after keys of these biases."""
    return torch.maximum(level, coarse(bias.amax(-1, keepdim=True)))


class Biases(NamedTuple):
    """A block's biases b beside the level of the sums before it, which counts as one that all rows see."""

    rows: Tensor  # (B, H, n): e, the largest that a row sees
    keys: Tensor  # (B, H, n): exp(b_j - e_i) of joint heads, 1 elsewhere
    after: Tensor  # (B, H, n): what keys are worth in the sums after
    level: Tensor  # (B, H, 1): of the sums after
    pairs: Tensor | None = None  # (B, H, n, n): exp(b_j - e_i) of heads that are not joint; None where all are
    past: Tensor | None = None  # (B, H, n): what the sums before are worth to rows; None for 1
    fading: Tensor | None = None  # (B, H, 1): and in those after

    @classmethod
    def of(cls, bias: Tensor, level: Tensor, span: int, joint: Tensor) -> Biases:
        """From b (B, H or 1, n), the level (B, H, 1) and joint heads (B, H), where it is the block's last already."""
        if bool(joint.all()):
            after = exponential_(bias - level)
            return cls(level.expand(after.shape), after, after, level)
        place, wide = torch.arange(bias.shape[-1], device=bias.device), bias.expand(*level.shape[:2], -1)
        largest = torch.cat((level, torch.maximum(level, coarse(wide).cummax(-1).values)), -1)
        num_seen = place // span * span if span else place + 1
        rows, last, joint = largest[..., num_seen], largest[..., -1:], joint.unsqueeze(-1)
        past, after, fading = (exponential_(x) for x in (level - rows, bias - last, level - last))
        # In joint heads 1 for all that a row sees: `keys` has the factor.
        pairs = exponential_((bias.unsqueeze(-2) - rows.unsqueeze(-1)).masked_fill_(joint.unsqueeze(-1), 0))
        pairs.masked_fill_(place >= num_seen.unsqueeze(-1), 0)
        return cls(rows, after.masked_fill(~joint, 1), after, last, pairs, past, fading)

    def weigh(self, values: Tensor) -> Tensor:
        """Values (B·H, n, Dv) as rows of their block read them."""
        return values * self.keys.flatten(0, 1).unsqueeze(-1)

    def fade_(self, scores: Tensor) -> Tensor:
        """Weigh scores (B·H, G·n, n) by row and key, in place."""
        if self.pairs is not None:
            scores.unflatten(1, (-1, scores.shape[-1])).mul_(self.pairs.flatten(0, 1).unsqueeze(1))
        return scores

    def of_past(self, rows: Tensor) -> Tensor:
        """Rows (B·H, G·n, ·) times what the sums before are worth to them."""
        if self.past is None:
            return rows
        past = self.past.flatten(0, 1)[:, None, :, None]
        return (torch.unflatten(rows, 1, (-1, past.shape[2])) * past).view(rows.shape)

    def beside(self, num: Tensor, den: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows whose exponents have the biases again, what that rounds of them in the rows; None for 0."""
        if reference is None:
            return num, den, self.references(self.rows.new_zeros(()).expand(*self.rows.shape[:2], den.shape[1]))
        rounded = self.references(reference)
        # Vast biases leave no digit of an exponent: it cancels in num / den, which the bounds keep finite.
        factor = exponential_((reference - self.references(rounded, -1)).clamp_(-60, 60)).view_as(den)
        return num * factor, den * factor, rounded

    def references(self, reference: Tensor, sign: int = 1) -> Tensor:
        """Exponents (B, H, G·n) of rows with, or (sign -1) without, the biases that they are relative to."""
        rows = self.rows.unsqueeze(2)
        return torch.add(reference.unflatten(2, (-1, rows.shape[-1])), rows, alpha=sign).flatten(2)
