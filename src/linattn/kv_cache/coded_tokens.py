"""Keys and values in few bits; letters as in kv_cache/__init__.py, P numbers of a code, N blocks of equal bits.

They are written and read in plain torch, or in compiled code on a CPU, from the wheel linattn-compiled: there codes
become numbers in a processor's cache, a few tokens at a time.
"""

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from linattn.kv_cache.codes import Codes, coded_bytes
from linattn.kv_cache.frames import Frame, Frames
from linattn.softmax.attention import Scoring, read
from linattn.softmax.partial import Partial, combine
from linattn.softmax.tokens import Tokens

# Numbers that are decoded at once, of some tokens at least: as many as a processor's cache holds, or as take far longer
# than to start the operations on them, of which each piece has about a hundred.
_CPU_PIECE, _GPU_PIECE, _FEWEST = 2**18, 2**24, 256
# Numbers of a vector at most: what a processor has not is not used.
_WIDEST = 16
# Multiplications from which a second thread is worth its start; a number is decoded in the time of four.
_MANY, _DECODED = 2**21, 4


class CodedTokens(NamedTuple):
    """Keys and values as codes relative to frames, and the biases on their logits (B, H, n)."""

    key: Codes
    value: Codes
    bias: Tensor
    frames: Frames

    @classmethod
    def of(cls, inside: Tokens, frames: Frames, bits: tuple[float, float], *, in_compiled_code: bool = False) -> Self:
        """Tokens relative to frames that were made for so many bits of keys and of values."""
        key, value = (
            Codes.of(x, frame.bits, coded_bytes(frame.mean.shape[-1], few) - 2, in_compiled_code=in_compiled_code)
            for x, frame, few in zip(inside[:2], frames, bits, strict=True)
        )
        return cls(key, value, inside.bias, frames)

    def then(self, other: Self) -> Self:
        """Append other tokens, in the others' frames."""
        bias = torch.cat((self.bias, other.bias), 2)
        return type(self)(self.key.then(other.key), self.value.then(other.value), bias, other.frames)

    def cut(self, start: int, stop: int) -> Self:
        """Consecutive tokens."""
        bias = self.bias[:, :, start:stop]
        return type(self)(self.key.cut(start, stop), self.value.cut(start, stop), bias, self.frames)

    def at(self, place: Tensor, bias: Tensor) -> Self:
        """Tokens by number (B, H, n), with these biases."""
        return type(self)(self.key.at(place), self.value.at(place), bias, self.frames)

    def decoded(self, *, in_compiled_code: bool = False) -> Tokens:
        """Tokens relative to the frames, (B, H, n, P)."""
        key, value = (
            codes.rows(frame.bits, frame.order.shape[-1], self.bias.dtype, in_compiled_code=in_compiled_code)
            for codes, frame in zip(self[:2], self.frames, strict=True)
        )
        return Tokens(key, value, self.bias)

    def read(self, query: Tensor, scoring: Scoring, followed: Tokens | None) -> Partial:
        """Rows (B, H, G, n, Dv) over all of them, decoded a piece at a time; or over numbers that gradients follow."""
        dtype, groups = self.bias.dtype, query.shape[2:4]
        rows = self.frames.key.queries(query.flatten(2, 3), dtype).unflatten(2, groups)
        widths = rows.shape[-1] + self.frames.value.order.shape[-1]
        number, numbers = self.bias.shape[2], self.bias.shape[:2].numel() * widths
        size = max((_CPU_PIECE if query.is_cpu else _GPU_PIECE) // max(numbers, 1), _FEWEST)
        cuts = (self.cut(start, start + size).decoded() for start in range(0, max(number, 1), size))
        pieces: Iterable[Tokens] = cuts if followed is None else [followed]
        # Relative to the frames logits lack q·μ, the same for all keys, and Σ_s a_s v_s = μ + σ·H(Σ_s a_s ṽ_s).
        lacking = (query.to(dtype) * self.frames.key.mean.unsqueeze(2)).sum(-1)
        if scoring.soft_cap is not None:
            # A cap is of the entire logit: a coordinate more makes up for what it lacks.
            rows, lacking = torch.cat((rows, lacking.unsqueeze(-1)), -1), torch.zeros_like(lacking)
            pieces = (x._replace(key=torch.nn.functional.pad(x.key, (0, 1), value=1.0)) for x in pieces)
        parts = (read(rows, piece, scoring, is_causal=False, with_log=True).partial() for piece in pieces)
        out, log = combine(*parts)
        out = self.frames.value.outside(out.flatten(2, 3)).unflatten(2, groups)
        return Partial(out, log + scoring.scale * lacking)

    def leaves(self) -> list[Tensor]:
        """The tensors, in order."""
        return [*self.key, *self.value, *self.frames.key, *self.frames.value, self.bias]

    @classmethod
    def from_leaves(cls, tensors: Iterable[Tensor]) -> Self:
        """From `leaves`."""
        *codes, bias = tensors
        frames = Frames(Frame(*codes[4:8]), Frame(*codes[8:]))
        return cls(Codes(*codes[:2]), Codes(*codes[2:4]), bias, frames)


def read_in_compiled_code(
    query: Tensor,  # (B, H, G, Lq, D) float32
    held: CodedTokens,
    levels: Tensor,  # (511,), of 0, 1, … 8 bits one after the other
    scale: float,
    beside: Partial,
) -> Partial:
    """Rows over all of them, and over the keys of rows beside these, which are written over; O(Lq·n·(D + Dv)) time."""
    # Imported here: a wheel of its own, which most do not have.
    from linattn_compiled import read_codes

    key, value, bias, frames = held
    (batch, heads, groups, length, head_dim), value_dim = query.shape, frames.value.mean.shape[-1]
    out, log = (x.contiguous() for x in beside)
    pairs = (x for pair in zip((*key, *frames.key), (*value, *frames.value), strict=True) for x in pair)
    tensors = [*(x.contiguous() for x in (query, *pairs, bias)), levels, out, log]
    number, sizes = key.scale.shape[2], [(x.order.shape[-1], x.bits.shape[-1]) for x in frames]
    work = batch * heads * number * (groups * length + _DECODED) * sum(size for size, _ in sizes)
    read_codes(
        *(x.data_ptr() for x in tensors),
        *(batch * heads, groups * length, head_dim, value_dim, number, key.code.shape[-1], value.code.shape[-1]),
        *(x for size, blocks in sizes for x in (size, size // blocks)),
        *(True, torch.get_num_threads() if work > _MANY else 1, _WIDEST, scale),
    )
    return Partial(out, log)
