"""How a fold is cut and kept: blocks of tokens, buffers, and the running sums; letters as in blocked/__init__.py."""

import math

import torch
from torch import Tensor

from linattn.attention.sums import Sums, per_feature
from linattn.softmax.precision import LOG2_E, small_power

# Floats of one feature block. Measured on a CPU with two cores of 1 MB second-level cache, for 8 and 64 rows and 64 to
# 1024 features: within 5 % of the best of all sizes everywhere, while four times as many cost up to 25 %.
_CPU_BLOCK = 2**20
_GPU_BLOCK = 2**24
# By how much a lone key may exceed an exponent before the sums move to it.
RISE = 20.0


def power_(x: Tensor) -> Tensor:
    """2^x, written over x, but 0 below 2^-88 in float32 (0.7 of a dtype's range), less than sums are rounded by."""
    # Products of smaller numbers are subnormal: processors take up to two hundred times as long for those.
    return torch.threshold_(x, math.log2(small_power(x.dtype, 0.7)), -torch.inf).exp2_()


def exponential_(x: Tensor) -> Tensor:
    """exp(x) by `power_`; with the pass for its factor, still half of what torch's exp takes on a CPU."""
    return power_(x.mul_(LOG2_E))


def by_columns(S: Tensor) -> Tensor:
    """A copy of sums (…, R, Dv) that lies Dv by R in memory, for `add_product_`."""
    return S.mT.clone(memory_format=torch.contiguous_format).mT


def add_product_(S: Tensor, phi: Tensor, value: Tensor) -> None:
    """S <- S + φᵀv of sums (B·H, R, Dv) that lie by columns: written that way round, a tenth to a seventh faster."""
    S.mT.baddbmm_(value.mT, phi)


def coarse(exponent: Tensor) -> Tensor:
    """The next multiple of 1/64: sums of such exponents are exact."""
    return torch.where(exponent.abs() < 2**17, exponent.mul(64).ceil_() / 64, exponent)


class Running:
    """The sums while a fold runs, heads flattened: S (B·H, R, Dv), z (B·H, R), m (B, H, M); those given stay.

    Their exponent is m and a level (B, H, 1), which all features share: 0 but beside biases.
    """

    def __init__(self, before: Sums) -> None:
        self._before = before
        self.S, self.z, self.m = before.S.flatten(0, 1), before.z.flatten(0, 1), before.m
        self._owned, self.level = False, self.m.new_zeros(*self.m.shape[:2], 1)
        self._risen: Tensor | None = torch.ones_like(self.level, dtype=torch.bool)  # heads with biases within m

    def raise_level(self) -> None:
        """Keep a level apart in all heads, beside `coarse` exponents m."""
        if self._risen is not None:
            top = coarse(self.m.amax(-1, keepdim=True)).masked_fill_(~self._risen, 0)
            self.m, self.level, self._risen = self.m - top, self.level + top, None
            self.rescale(coarse(self.m))

    def relabel(self, level: Tensor, heads: Tensor) -> None:
        """Keep this level apart in these heads (B, H), and the rest of what was apart within m."""
        self._risen = heads.unsqueeze(-1)
        level = torch.where(self._risen, level, self.level)
        self.m, self.level = self.m + (self.level - level), level

    def fade(self, level: Tensor) -> None:
        """Go on to a level at or above the sums' own, at which they are worth less."""
        self._multiply(exponential_(self.level - level).flatten(0, 1))
        self.level = level

    def rescale(self, c: Tensor) -> None:
        """Make c (B, H, M) the exponent m, kept as it is: S and z times exp(m - c)."""
        if not self._owned:
            self.S, self.z = by_columns(self.S), self.z.clone(memory_format=torch.contiguous_format)
            self._owned = True
        if c is not self.m:
            self._multiply(per_feature((self.m - c).exp_(), self.z.shape[-1]).flatten(0, 1))
            self.m = c

    def _multiply(self, factor: Tensor) -> None:
        """Multiply S and z by a factor (B·H, R or 1)."""
        self.S.mul_(factor.unsqueeze(-1))
        self.z.mul_(factor)

    def fold_in(self, phi_k: Tensor, value: Tensor, total: Tensor | None = None) -> None:
        """S <- S + φ(k)ᵀv and z <- z + Σ φ(k), or `total`, of a block (B, H, n, ·), relative to the exponent."""
        add_product_(self.S, phi_k.flatten(0, 1), value.flatten(0, 1))
        self.z.add_((phi_k.sum(-2) if total is None else total).flatten(0, 1))

    def views(self) -> Sums:
        """The sums now, as views."""
        return Sums(self.S.view(self._before.S.shape), self.z.view(self._before.z.shape), self.m + self.level)

    def sums(self) -> Sums:
        """The sums now, in memory of their own."""
        S, z, m = self.views()
        return Sums(S.contiguous(), z, m) if self._owned else Sums(S.clone(), z.clone(), m)


def block_size(x: Tensor, num_features: int, *, is_causal: bool = False, span: int = 0) -> int:
    """Tokens per block of x (…, L, D), a multiple of a span; causal blocks pay for n × n products too."""
    budget = _CPU_BLOCK if x.device.type == "cpu" else _GPU_BLOCK
    size = max(budget // max(x.shape[:-2].numel() * num_features, 1), 64)
    size = min(size, 128 if is_causal else 1024)
    return -(-size // span) * span if span else size


def num_blocks(x: Tensor, num_features: int, *, is_causal: bool = False, span: int = 0) -> int:
    """How many blocks the tokens of x (…, L, D) are cut into."""
    return -(-x.shape[-2] // block_size(x, num_features, is_causal=is_causal, span=span))


def blocks(x: Tensor, num_features: int, *, is_causal: bool = False, span: int = 0) -> list[slice]:
    """Consecutive blocks of the tokens of x (…, L, D); the last may be shorter."""
    length, size = x.shape[-2], block_size(x, num_features, is_causal=is_causal, span=span)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def is_seen(x: Tensor) -> bool:
    """Whether a look at numbers costs little; on other devices it would wait for them."""
    return x.device.type == "cpu"


class Workspace:
    """Buffers that the blocks of one fold write over again: fresh memory costs more than arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like = like  # in the accumulation dtype, on the fold's device
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor of this shape, in the memory of the first block's."""
        size, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(shape)
        return buffer if buffer.shape == shape else buffer.view(-1)[:size].view(shape)

    def rows(self, name: str, x: Tensor, masked: Tensor | None = None) -> Tensor:
        """A block of tokens in the accumulation dtype, masked ones (B, H or 1, n) 0; copied only if needed."""
        if masked is None and x.dtype == self._like.dtype:
            return x
        rows = self.buffer(name, *x.shape).copy_(x)
        return rows if masked is None else rows.masked_fill_(masked.unsqueeze(-1), 0)

    def product(self, name: str, first: Tensor, second: Tensor) -> Tensor:
        """first·second, for batches of matrices."""
        return torch.bmm(first, second, out=self.buffer(name, *first.shape[:-1], second.shape[-1]))
