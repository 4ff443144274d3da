"""Merged keys in few bits: what a stream keeps of them; letters as in kv_cache/__init__.py, W the width of a row.

Rows are rounded relative to the mean and the deviation of each coordinate, since keys have some that are large in every
token, and in a mixed basis, in which none is far from the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from linattn.softmax.tokens import Tokens
from linattn.softmax.weighted import Reading

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
    product: Tensor = x.unflatten(-1, (-1, piece)) @ (_signs(piece, x) * piece**-0.5)
    return product.flatten(-2)


def _signs(size: int, like: Tensor) -> Tensor:
    """A Hadamard matrix of a power of two, of 1 and -1, in the numbers of a tensor."""
    if size == 1:
        return like.new_ones(1, 1)
    half = _signs(1 << (size.bit_length() - 1) // 2, like)
    whole = torch.kron(half, half)
    if len(whole) == size:
        return whole
    above = torch.cat((whole, whole), 1)
    return torch.cat((above, torch.cat((whole, -whole), 1)))


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
        level, each = level.flatten(-2)[..., : x.shape[-1]], 8 // bits
        # One of each stretch of a row to a byte: whole rows are shifted alike, which processors do fast.
        level = torch.nn.functional.pad(level, (0, -x.shape[-1] % each)).unflatten(-1, (each, -1))
        code = level[..., 0, :]
        for place in range(1, each):
            code = code | (level[..., place, :] << bits * place)
        return cls(code, zero, step)

    def rows(self, width: int, bits: int, dtype: torch.dtype) -> Tensor:
        """The numbers that these stand for."""
        level = torch.cat([(self.code >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], -1)
        grouped = _pieces(level[..., :width].to(dtype), GROUP)
        numbers = torch.addcmul(self.zero.to(dtype).unsqueeze(-1), grouped, self.step.to(dtype).unsqueeze(-1))
        return numbers.flatten(-2)[..., :width]


def coded_bytes(width: int, bits: int) -> int:
    """Bytes of a row's levels, zero points and steps.

    Example:
        >>> coded_bytes(256, 4)
        160
    """
    return -(-width * bits // 8) + 4 * -(-width // GROUP)


class Frame(NamedTuple):
    """Means and deviations of coordinates that rows (B, H, n, W) are quantized relative to, in a mixed basis."""

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
        return type(self)(*(torch.where(holds, first, second) for first, second in zip(self, other, strict=True)))

    def inside(self, x: Tensor) -> Tensor:
        """Rows relative to the frame."""
        return mixed((x - self.mean) / self.deviation)

    def outside(self, x: Tensor) -> Tensor:
        """Rows from rows relative to the frame; inverse of `inside`."""
        return torch.addcmul(self.mean, mixed(x), self.deviation)


class Frames(NamedTuple):
    """Frames of keys and of values."""

    key: Frame
    value: Frame

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        """Of those tokens that are there."""
        there = tokens.bias != -torch.inf
        return cls(Frame.of(tokens.key.detach(), there), Frame.of(tokens.value.detach(), there))

    def where(self, holds: Tensor, other: Self) -> Self:
        """Select these frames for the heads (B, H) for which a condition holds, others for the rest."""
        return type(self)(self.key.where(holds, other.key), self.value.where(holds, other.value))

    def inside(self, tokens: Tokens) -> Tokens:
        """Tokens relative to the frames."""
        return Tokens(self.key.inside(tokens.key), self.value.inside(tokens.value), tokens.bias)

    def outside(self, tokens: Tokens) -> Tokens:
        """Tokens from tokens relative to the frames; inverse of `inside`."""
        return Tokens(self.key.outside(tokens.key), self.value.outside(tokens.value), tokens.bias)

    def queries(self, query: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries (B, H, G, n, D) of keys that are relative to these frames: logits lack q·μ, the same for all keys.

        With k = μ + σ·H(k̃):   q·k = H(σ·q)·k̃ + q·μ
        """
        return mixed(query.to(dtype) * self.key.deviation.unsqueeze(2))

    def rows(self, reading: Reading, query: Tensor, scale: float) -> Reading:
        """Rows of what `queries` read, of values that are relative to these frames.

        Σ_s a_s v_s = μ + σ·H(Σ_s a_s ṽ_s)   for weights of sum 1
        """
        key, value = (Frame(*(x.unsqueeze(2) for x in frame)) for frame in self)
        log = reading.log_normalizer
        if log is not None:
            log = log + scale * (query.to(log.dtype) * key.mean).sum(-1)
        return Reading(value.outside(reading.out).to(query.dtype), log)


class CodedTokens(NamedTuple):
    """Merged keys and values as codes relative to frames, and the biases on their logits (B, H, n)."""

    key: Codes
    value: Codes
    bias: Tensor
    frames: Frames

    @classmethod
    def of(cls, tokens: Tokens, frames: Frames, bits: int) -> Self:
        """Tokens that are relative to frames."""
        return cls(Codes.of(tokens.key, bits), Codes.of(tokens.value, bits), tokens.bias, frames)

    @property
    def is_there(self) -> Tensor:
        """Which heads (B, H) have a token at all: none before their first."""
        return (self.bias != -torch.inf).any(-1)

    def frames_for(self, others: Tokens) -> Frames:
        """Frames of these tokens; heads that have none take the others'."""
        return self.frames.where(self.is_there, Frames.of(others))

    def then(self, other: Self) -> Self:
        """Append other tokens, in the others' frames."""
        key, value = (
            Codes(*(torch.cat(pair, 2) for pair in zip(first, second, strict=True)))
            for first, second in ((self.key, other.key), (self.value, other.value))
        )
        return type(self)(key, value, torch.cat((self.bias, other.bias), 2), other.frames)

    def tokens(self, bits: int) -> Tokens:
        """Dequantize, relative to the frames."""
        dtype = self.bias.dtype
        key, value = (
            codes.rows(frame.mean.shape[-1], bits, dtype)
            for codes, frame in zip((self.key, self.value), self.frames, strict=True)
        )
        return Tokens(key, value, self.bias)

    def leaves(self) -> list[Tensor]:
        """The tensors, in order."""
        return [*self.key, *self.value, *self.frames.key, *self.frames.value, self.bias]

    @classmethod
    def from_leaves(cls, tensors: Iterable[Tensor]) -> Self:
        """From `leaves`."""
        *codes, bias = tensors
        return cls(Codes(*codes[:3]), Codes(*codes[3:6]), bias, Frames(Frame(*codes[6:8]), Frame(*codes[8:])))


def _pieces(x: Tensor, size: int) -> Tensor:
    """Rows (..., W) in pieces (..., ⌈W/size⌉, size), the last one filled up with its last number."""
    width = x.shape[-1]
    number = -(-width // size)
    if number * size > width:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], number * size - width)), -1)
    pieces: Tensor = x.unflatten(-1, (number, size))
    return pieces
