"""Merged keys in few bits: what a stream keeps of them; letters as in exact/__init__.py, W the width of a row.

Rows are rounded relative to the mean and the deviation of each coordinate, since keys have some that are large in every
token, and in a mixed basis, in which none is far from the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from linattn.attention.exact.keys import Tokens

GROUP = 32
"""Numbers that share a zero point and a step."""

_LARGEST = torch.finfo(torch.float16).max
# Of a coordinate's deviation in the root mean square of all: later keys may differ more than those that it is taken of.
_LEAST = 2**-5


def mixed(x: Tensor) -> Tensor:
    """Rows (..., W) times a Hadamard matrix, which spreads a large coordinate over all; its own inverse.

    Of a width that is no power of two, pieces of the largest one that divides it are mixed each in itself.

    Example:
        >>> mixed(torch.tensor([4.0, 0.0, 0.0, 0.0])).tolist()
        [2.0, 2.0, 2.0, 2.0]

    Source: Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456), which rounds keys and values so.
    """
    piece = mixed_width(x.shape[-1])
    if piece < 2:
        return x
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < piece:
        above = torch.cat((matrix, matrix), 1)
        matrix = torch.cat((above, torch.cat((matrix, -matrix), 1)))
    found: Tensor = x.unflatten(-1, (-1, piece)) @ (matrix * piece**-0.5)
    return found.flatten(-2)


def mixed_width(width: int) -> int:
    """How many coordinates of a row `mixed` spreads each one over: the largest power of two that divides its width.

    Example:
        >>> mixed_width(80)
        16
    """
    return width & -width


class Codes(NamedTuple):
    """Rows (..., W) of which each number is one of 2^bits levels between the least and the largest of its group.

        z + s·round((x - z) / s),   z = min x,   s = (max x - min x) / (2^bits - 1)

    Source: Liu et al. 2024 (KIVI, arXiv 2402.02750), equation 1.
    """

    code: Tensor  # (..., ⌈W·bits/8⌉) uint8, several levels to a byte
    zero: Tensor  # (..., ⌈W/32⌉) float16, z
    step: Tensor  # as z, s

    @classmethod
    def of(cls, x: Tensor, bits: int) -> Self:
        """The nearest levels: rows that are levels already keep theirs. Numbers beyond float16's are cut."""
        most, grouped = 2**bits - 1, _pieces(x, GROUP)
        zero = grouped.amin(-1).clamp(-_LARGEST, _LARGEST).half()
        step = ((grouped.amax(-1) - zero) / most).clamp(max=_LARGEST).half()
        below, safe = zero.to(x.dtype), torch.where(step == 0, 1, step).to(x.dtype)
        level = ((grouped - below.unsqueeze(-1)) / safe.unsqueeze(-1)).round().clamp(0, most).to(torch.uint8)
        several = _pieces(level.flatten(-2)[..., : x.shape[-1]], 8 // bits)
        return cls((several << _shifts(bits, x.device)).sum(-1, dtype=torch.uint8), zero, step)

    def rows(self, width: int, bits: int, dtype: torch.dtype) -> Tensor:
        """The numbers that these stand for."""
        level = (self.code.unsqueeze(-1) >> _shifts(bits, self.code.device)) & (2**bits - 1)
        grouped = _pieces(level.flatten(-2)[..., :width].to(dtype), GROUP)
        found = torch.addcmul(self.zero.to(dtype).unsqueeze(-1), grouped, self.step.to(dtype).unsqueeze(-1))
        return found.flatten(-2)[..., :width]


def coded_bytes(width: int, bits: int) -> int:
    """Bytes of a row's levels, zero points and steps.

    Example:
        >>> coded_bytes(256, 4)
        160
    """
    return -(-width * bits // 8) + 4 * -(-width // GROUP)


class Frame(NamedTuple):
    """What rows (B, H, n, W) are rounded relative to: their coordinates' means and deviations, for good."""

    mean: Tensor  # (B, H, 1, W)
    deviation: Tensor  # (B, H, 1, W), no less than a share of the root of their mean square; the means' of one row

    @classmethod
    def of(cls, x: Tensor, there: Tensor) -> Self:
        """Of those rows that are there (B, H, n)."""
        share = (there / there.sum(-1, keepdim=True).clamp(min=1)).to(x.dtype).unsqueeze(2)
        mean = share @ x
        variance = share @ (x - mean).square()
        least = _LEAST**2 * variance.sum(-1, keepdim=True) / max(x.shape[-1], 1)
        deviation = torch.maximum(variance, least)
        # Of rows that are all alike the deviation says nothing of what others have.
        deviation = torch.where(deviation == 0, mean.square().mean(-1, keepdim=True), deviation).sqrt()
        return cls(mean, torch.where(deviation == 0, 1, deviation))

    def where(self, holds: Tensor, other: Self) -> Self:
        """This one for the heads (B, H) for which a condition holds, another for the rest."""
        holds = holds[..., None, None]
        return type(self)(*(torch.where(holds, own, its) for own, its in zip(self, other, strict=True)))


class CodedRows(NamedTuple):
    """Rows (B, H, n, W) as codes in a frame."""

    codes: Codes
    frame: Frame

    @classmethod
    def of(cls, x: Tensor, bits: int, frame: Frame) -> Self:
        """Rows rounded."""
        return cls(Codes.of(mixed((x - frame.mean) / frame.deviation), bits), frame)

    def rows(self, bits: int) -> Tensor:
        """What they stand for."""
        mean, deviation = self.frame
        return torch.addcmul(mean, mixed(self.codes.rows(mean.shape[-1], bits, mean.dtype)), deviation)


class CodedTokens(NamedTuple):
    """Merged keys and values as codes, and the biases on their logits (B, H, n)."""

    key: CodedRows
    value: CodedRows
    bias: Tensor

    @classmethod
    def of(cls, tokens: Tokens, bits: int, before: CodedTokens | None) -> Self:
        """Tokens rounded in the frames of those before; heads that had none take their own."""
        there = tokens.bias != -torch.inf

        def rounded(x: Tensor, held: CodedRows | None) -> CodedRows:
            frame = Frame.of(x, there)
            if before is not None and held is not None:
                frame = held.frame.where((before.bias != -torch.inf).any(-1), frame)
            return CodedRows.of(x, bits, frame)

        held = (None, None) if before is None else before[:2]
        key, value = (rounded(x.detach(), rows) for x, rows in zip(tokens[:2], held, strict=True))
        return cls(key, value, tokens.bias)

    def tokens(self, bits: int) -> Tokens:
        """What they stand for."""
        return Tokens(self.key.rows(bits), self.value.rows(bits), self.bias)

    def leaves(self) -> list[Tensor]:
        """Its tensors, in order."""
        return [*self.key.codes, *self.key.frame, *self.value.codes, *self.value.frame, self.bias]

    @classmethod
    def from_leaves(cls, tensors: Iterable[Tensor]) -> Self:
        """From its tensors."""
        *found, bias = tensors
        key, value = (CodedRows(Codes(*part[:3]), Frame(*part[3:])) for part in (found[:5], found[5:]))
        return cls(key, value, bias)


def _pieces(x: Tensor, size: int) -> Tensor:
    """Rows (..., W) in pieces (..., ⌈W/size⌉, size), the last one filled up with its last number."""
    width = x.shape[-1]
    number = -(-width // size)
    if number * size > width:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], number * size - width)), -1)
    pieces: Tensor = x.unflatten(-1, (number, size))
    return pieces


def _shifts(bits: int, device: torch.device) -> Tensor:
    """By how much the levels in a byte are shifted."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
