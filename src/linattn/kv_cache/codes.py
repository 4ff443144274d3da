"""Rows of numbers in few bits: how they lie in memory; letters as in kv_cache/__init__.py.

A row (W,) is filled up with zeros to P numbers, a multiple of 8, and cut into N blocks of R, each in bits of its own. A
number z of it is s·l for one scale s of the row and one of the 2^b levels of its block:

    code    the blocks one after the other, each a stream of R·b bits, lowest first: 8 numbers fill b bytes
    scale   s, float16

Letters: P numbers of a row, R of a block, N blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from linattn.kv_cache.levels import COMPILED, COMPILED_SIZES, level_numbers, near_levels, table
from linattn.softmax.tokens import picked

# Of numbers relative to a frame: scales, up to three times as large where levels lie below numbers, are float16's.
LARGEST = 2.0**14
# Numbers that are 0 but for rounding, in the middle of all levels, are rounded alike.
_TIE = 2.0**-14
# Numbers that a cache has room for.
_ROOM = 2**16
# A share of a row's squares that rounding may add.
_ALIKE = 2.0**-22
# Of a row's root mean square, that its scale is sought among.
_FACTORS = (1.0, 0.6, 0.7, 0.8, 0.9, 1.15, 1.35, 1.6)

WIDEST = 32
"""Numbers of a block at most."""

_UNIT = 8


class Layout(NamedTuple):
    """How rows of a width are cut into blocks."""

    block: int  # R, a power of two
    number: int  # N

    @classmethod
    def of(cls, width: int) -> Self:
        """Blocks as wide as divide the row, up to 32; refuse rows whose order is not one of 16 bits."""
        if width > 2**15:
            raise ValueError(f"quantized rows have at most 2¹⁵ numbers, got {width}; give bits=None and no tiers")
        filled = -(-width // _UNIT) * _UNIT
        block = min(filled & -filled, WIDEST) or _UNIT
        return cls(block, filled // block)

    @property
    def size(self) -> int:
        """P."""
        return self.block * self.number

    def spent(self, bits: float) -> int:
        """Bits of all blocks' numbers together, for so many a number in the mean."""
        return math.floor(bits * self.number)


def coded_bytes(width: int, bits: float) -> int:
    """Bytes of a row: its codes and its scale."""
    layout = Layout.of(width)
    return layout.block * layout.spent(bits) // 8 + 2


class Codes(NamedTuple):
    """Rows (B, H, n, P) as a scale and a level for each number, of the bits of its block."""

    # z ≈ s·l,   l the level nearest to z/(f·s₀),   s₀² = Σ 4^b z² / Σ 4^b,   s = Σ 4^b z·l / Σ 4^b l²
    # The bits b of a block say how much an error there counts: f is the one of eight factors with the least
    # Σ 4^b (z - s·l)². A smaller one makes all levels useful where the largest number is nearer than the last level, as
    # it mostly is of a row's few numbers; a larger one reaches what is farther.

    code: Tensor  # (B, H, n, bytes) uint8
    scale: Tensor  # (B, H, n) float16

    @classmethod
    def of(cls, x: Tensor, bits: Tensor, num_bytes: int, *, in_compiled_code: bool = False) -> Self:
        """The nearest levels, of blocks of so many bits (B, H, N). Numbers whose scale float16 has not are cut."""
        # Compiled code finds the same: sums are of double precision there and here, and their order decides nothing.
        if in_compiled_code:
            return cls(*_write_in_compiled_code(x, bits, num_bytes))
        x = x.detach().clamp(-LARGEST, LARGEST)
        blocks = x.unflatten(-1, (bits.shape[-1], x.shape[-1] // max(bits.shape[-1], 1))).transpose(2, 3).contiguous()
        # Compiled code runs on a CPU, and other devices are slow with double precision, or have none.
        precise = torch.float64 if x.is_cpu else x.dtype
        worth = torch.where(bits > 0, 4.0 ** bits.to(precise), 0).unsqueeze(-1)

        def weighed(product: Tensor) -> Tensor:
            """Sums (…, B, H, n) over rows, by how much an error counts."""
            return (product.sum(-1, dtype=worth.dtype) * worth).sum(-2)

        size = (weighed(blocks.square()) / (worth.sum(2) * blocks.shape[-1]).clamp(min=1)).sqrt().to(x.dtype)
        size = torch.where(size == 0, 1, size)
        relative = blocks / size[:, :, None, :, None]
        wide, factors, explained = bits[..., None, None].int(), relative.new_tensor(_FACTORS), []
        for some in factors.split(max(1, _ROOM // max(1, relative.numel()))):
            near = near_levels(relative / some.view(-1, 1, 1, 1, 1, 1), wide)
            explained.append(weighed(relative * near).square() / weighed(near.square()).clamp(min=_TIE))
        best = torch.cat(explained)
        # Where all explain the same, but for rounding, the first.
        best[0] *= 1 + _ALIKE
        factor = factors[best.argmax(0)][:, :, None, :, None]
        level = level_numbers(relative / factor + _TIE, wide)
        nearest = _levels(level, wide, x)
        power = weighed(nearest.square())
        scale = weighed(relative * nearest) / torch.where(power == 0, 1, power) * size
        return cls(_packed(level.transpose(2, 3).flatten(3), bits, num_bytes), scale.float().half())

    def rows(self, bits: Tensor, size: int, dtype: torch.dtype, *, in_compiled_code: bool = False) -> Tensor:
        """The numbers (B, H, n, P) that these stand for, P given."""
        scale = self.scale.to(dtype)
        if in_compiled_code:
            return _read_in_compiled_code(self.code, scale, bits, size)
        place, shift, wide = _places(bits, size)
        # Two bytes hold a number wherever it begins; those of no bits may begin behind the last.
        code = torch.nn.functional.pad(self.code, (0, 2)).int()
        words = code[..., :-1] | code[..., 1:] << 8
        level = words.gather(3, place.long().expand(*words.shape[:3], -1)) >> shift
        return _levels(level, wide, scale) * scale.unsqueeze(-1)

    def cut(self, start: int, stop: int) -> Self:
        """Consecutive rows."""
        return type(self)(self.code[:, :, start:stop], self.scale[:, :, start:stop])

    def then(self, other: Self) -> Self:
        """Append other rows."""
        return type(self)(*(torch.cat(pair, 2) for pair in zip(self, other, strict=True)))

    def at(self, place: Tensor) -> Self:
        """Rows by number (B, H, n)."""
        return type(self)(picked(self.code, place), self.scale.gather(-1, place))


def _write_in_compiled_code(x: Tensor, bits: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows of float32 on a CPU."""
    # Imported here: a wheel of its own, which most do not have.
    from linattn_compiled import write_codes

    (batch, heads, rows, size), block = x.shape, x.shape[-1] // max(bits.shape[-1], 1)
    x, bits, factors = x.contiguous(), bits.contiguous(), x.new_tensor(_FACTORS)
    code, scale = bits.new_empty(batch, heads, rows, num_bytes), x.new_empty(batch, heads, rows, dtype=torch.float16)
    write_codes(
        *(each.data_ptr() for each in (x, bits, code, scale, *COMPILED, factors)),
        *(*COMPILED_SIZES, batch * heads, rows, size, block, num_bytes, len(_FACTORS)),
        *(LARGEST, _TIE, _ALIKE),
    )
    return code, scale


def _read_in_compiled_code(code: Tensor, scale: Tensor, bits: Tensor, size: int) -> Tensor:
    """Rows of codes on a CPU and scales of float32."""
    from linattn_compiled import decode_codes

    code, scale, bits, x = code.contiguous(), scale.contiguous(), bits.contiguous(), scale.new_empty(*scale.shape, size)
    sizes = scale.shape[:2].numel(), scale.shape[2], size, size // max(bits.shape[-1], 1), code.shape[-1]
    decode_codes(*(each.data_ptr() for each in (code, scale, bits, COMPILED[0], x)), *sizes)
    return x


def _levels(level: Tensor, bits: Tensor, like: Tensor) -> Tensor:
    """Levels of the numbers in the lowest bits of integers, so many that they broadcast."""
    mask = (1 << bits.int()) - 1
    place = (level.int() & mask) + mask
    return table(like).index_select(0, place.flatten()).view(place.shape)


def _packed(level: Tensor, bits: Tensor, num_bytes: int) -> Tensor:
    """Numbers of levels (B, H, n, P) in so many bytes."""
    place, shift, wide = _places(bits, level.shape[-1])
    words = (level.int() & ((1 << wide) - 1)) << shift
    # Sums of bits that are set once each; the second byte of a word belongs to the next.
    total = words.new_zeros(*words.shape[:3], num_bytes + 1).scatter_add(3, place.long().expand_as(words), words)
    total, carried = total[..., :num_bytes], torch.nn.functional.pad(total[..., :num_bytes] >> 8, (1, 0))
    return (total & 255 | carried[..., :num_bytes]).to(torch.uint8)


def _places(bits: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of P numbers (B, H, 1, P) the byte in which it begins, the bit there, and its bits."""
    wide = bits.int().unsqueeze(-1).expand(*bits.shape, size // max(bits.shape[-1], 1)).flatten(2).unsqueeze(2)
    first = (wide.cumsum(-1) - wide).int()
    return first >> 3, first & 7, wide
