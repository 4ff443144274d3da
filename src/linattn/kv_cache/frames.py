"""Frames that rows are quantized relative to, one for each head; letters as in kv_cache/__init__.py.

Rows are taken relative to the mean and the deviation of each coordinate, since keys have some that are large in every
token; coordinates of like weight stand beside each other, and are mixed in blocks, in which none is far from the others
then. A block's numbers have bits of their own.

Letters: W width of a row, P numbers of its code, R of a block, N blocks, as in `codes`.
"""

from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from linattn.kv_cache.codes import WIDEST, Layout
from linattn.kv_cache.levels import DISTORTION
from linattn.softmax.tokens import Tokens

# Of a coordinate's deviation in the root mean square of all: later keys may differ more than those that it is taken of.
_LEAST = 2**-5
# Of the mean's size in the root mean square of all deviations: rows so large would be cut else.
_SHORTEST = 2**-8
# Steps of a weight's logarithm to base 2 by which coordinates are sorted: rounding alone puts none before another.
_STEPS = 4
# A Hadamard matrix, Sylvester's, whose corners are those of smaller sizes.
_SIGNS = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(WIDEST)] for i in range(WIDEST)], device="cpu")


def mixed(x: Tensor, block: int) -> Tensor:
    """Multiply blocks of rows (..., P) by a Hadamard matrix, which spreads large numbers over them; its own inverse."""
    matrix = _SIGNS[:block, :block].to(x) * block**-0.5
    return torch.flatten(x.unflatten(-1, (x.shape[-1] // block, block)) @ matrix, -2)


def allocated(weight: Tensor, total: int) -> Tensor:
    """Bits (..., N) of blocks, `total` in sum and 8 at most, that minimise Σ weight·distortion(bits)."""
    gain = weight.new_tensor([less - more for less, more in pairwise(DISTORTION)])
    gains = (gain.unsqueeze(-1) * weight.unsqueeze(-2)).flatten(-2)
    # Bit after bit to where it gains most, which is best since gains fall; of equal gains to the first.
    order = gains.argsort(dim=-1, descending=True, stable=True)[..., :total]
    chosen = torch.zeros_like(gains, dtype=torch.uint8).scatter(-1, order, 1)
    return torch.unflatten(chosen, -1, (len(DISTORTION) - 1, weight.shape[-1])).sum(-2, dtype=torch.uint8)


class Frame(NamedTuple):
    """Means, deviations and bits of the coordinates that rows (B, H, n, W) are quantized relative to."""

    mean: Tensor  # (B, H, 1, W)
    deviation: Tensor  # (B, H, 1, W), no less than a share of the root of their mean square; the means' of one row
    order: Tensor  # (B, H, P) int16, the coordinate at each place of a code; zeros fill it up
    bits: Tensor  # (B, H, N) uint8, of each block's numbers

    @classmethod
    def of(cls, x: Tensor, there: Tensor, bits: float, power: Tensor | None = None) -> Self:
        """Of those rows that are there (B, H, n), in so many bits a number in the mean."""
        # By mean squares of queries (B, H, W), since an error e_c moves logits by q_c·e_c, coordinates are sorted by
        # w_c = E[q_c²]·σ_c², and the blocks' bits minimise Σ w_c·distortion(bits_c). Else bits are equal; of a half the
        # first blocks have one more.
        share = (there.to(x.dtype) / there.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(2)
        mean = share @ x
        # Sums of rows all alike round the same way each time; differences of such say nothing of what others have.
        mean = mean + share @ (x - mean)
        size, length = (share @ (x - mean).abs()).mean(-1, keepdim=True), mean.abs().mean(-1, keepdim=True)
        size = torch.where(size == 0, length, size)
        # Squares of numbers near 1 are numbers, whatever size rows have; a power of two rounds nothing.
        size = torch.where(size == 0, 1, size).log2().round().exp2()
        variance = share @ ((x - mean) / size).square()
        least = _LEAST**2 * variance.sum(-1, keepdim=True) / max(x.shape[-1], 1)
        variance = torch.maximum(variance, torch.where(least == 0, 1, least))
        layout = Layout.of(x.shape[-1])
        if power is None:
            order = torch.arange(layout.size, device=x.device).expand(*x.shape[:2], -1)
            blocks = x.new_ones(*x.shape[:2], layout.number)
        else:
            weight = torch.nn.functional.pad(power * variance.squeeze(2), (0, layout.size - x.shape[-1]))
            order = (_STEPS * weight.log2()).round().argsort(dim=-1, descending=True, stable=True)
            blocks = weight.gather(-1, order).unflatten(-1, (layout.number, layout.block)).mean(-1)
        # Where these are nearly alike, later ones may differ by as much as they are long.
        deviation = variance.sqrt() * torch.maximum(size, _SHORTEST * length)
        return cls(mean, deviation, order.to(torch.int16), allocated(blocks, layout.spent(bits)))

    def inside(self, x: Tensor) -> Tensor:
        """Rows (B, H, n, W) relative to the frame, (B, H, n, P)."""
        return self._mixed((x - self.mean) / self.deviation)

    def outside(self, x: Tensor) -> Tensor:
        """Rows (B, H, n, W) from rows relative to the frame; inverse of `inside`."""
        place = self.order.argsort(-1)[..., : self.mean.shape[-1]].unsqueeze(2)
        rows = mixed(x, Layout.of(x.shape[-1]).block).gather(3, place.expand(*x.shape[:3], -1))
        return torch.addcmul(self.mean, rows, self.deviation)

    def queries(self, query: Tensor, dtype: torch.dtype) -> Tensor:
        """H(σ·q) of queries (B, H, n, W): q·k = H(σ·q)·k̃ + q·μ for k = μ + σ·H(k̃); q·μ is the same for all keys."""
        return self._mixed(query.to(dtype) * self.deviation)

    def _mixed(self, x: Tensor) -> Tensor:
        """Rows (B, H, n, W) filled up, sorted and mixed, (B, H, n, P)."""
        filled = torch.nn.functional.pad(x, (0, self.order.shape[-1] - x.shape[-1]))
        rows = filled.gather(3, self.order.long().unsqueeze(2).expand_as(filled))
        return mixed(rows, Layout.of(rows.shape[-1]).block)


class Frames(NamedTuple):
    """Frames of keys and of values."""

    key: Frame
    value: Frame

    @classmethod
    def of(cls, tokens: Tokens, bits: tuple[float, float], power: Tensor) -> Self:
        """Of tokens that are there and finite, in bits of keys and of values, for queries of mean squares (B, H, D)."""
        there = (tokens.bias != -torch.inf) & tokens.key.isfinite().all(-1) & tokens.value.isfinite().all(-1)
        key, value = (torch.where(there.unsqueeze(-1), x.detach(), 0) for x in tokens[:2])
        return cls(Frame.of(key, there, bits[0], power.detach()), Frame.of(value, there, bits[1]))

    def inside(self, tokens: Tokens) -> Tokens:
        """Tokens relative to the frames."""
        return Tokens(self.key.inside(tokens.key), self.value.inside(tokens.value), tokens.bias)

    def outside(self, tokens: Tokens) -> Tokens:
        """Tokens from tokens relative to the frames; inverse of `inside`."""
        return Tokens(self.key.outside(tokens.key), self.value.outside(tokens.value), tokens.bias)
