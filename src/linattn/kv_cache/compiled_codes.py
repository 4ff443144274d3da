"""Keys and values in few bits read in compiled code on a CPU, from the wheel linattn-compiled.

Codes become numbers in a processor's cache, a few tokens at a time.

Letters as in kv_cache/__init__.py; P numbers of a code, N blocks of equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.softmax.partial import Partial

# Numbers of a vector at most: what a processor has not is not used.
_WIDEST = 16
# Multiplications from which a second thread is worth its start; a number is decoded in the time of four.
_MANY, _DECODED = 2**21, 4


class CodedRows(NamedTuple):
    """Keys, or values, in few bits, and what they are relative to."""

    code: Tensor  # (B, H, n, bytes) uint8
    scale: Tensor  # (B, H, n) float16
    mean: Tensor  # (B, H, 1, ·) float32
    deviation: Tensor  # as the mean
    order: Tensor  # (B, H, P) int16, of coordinates
    bits: Tensor  # (B, H, N) uint8


def read_in_compiled_code(
    query: Tensor,  # (B, H, G, Lq, D) float32
    key: CodedRows,
    value: CodedRows,
    bias: Tensor | None,  # (B, H, n)
    levels: Tensor,  # (511,), of 0, 1, … 8 bits one after the other
    scale: float,
    beside: Partial | None = None,
) -> Partial:
    """Rows over all of them, and over the keys of rows beside these, which are written over; O(Lq·n·(D + Dv)) time."""
    # Imported here: a wheel of its own, which most do not have.
    from linattn_compiled import read_codes

    (batch, heads, groups, length, head_dim), value_dim = query.shape, value.mean.shape[-1]
    if beside is None:
        out, log = query.new_empty(*query.shape[:4], value_dim), query.new_empty(query.shape[:4])
    else:
        out, log = (x.contiguous() for x in beside)
    pairs = (x for pair in zip(key, value, strict=True) for x in pair)
    tensors = [x.contiguous() for x in (query, *pairs)]
    biases = None if bias is None else bias.contiguous()
    addresses = [x.data_ptr() for x in tensors]
    number, sizes = key.scale.shape[2], [(x.order.shape[-1], x.bits.shape[-1]) for x in (key, value)]
    work = batch * heads * number * (groups * length + _DECODED) * sum(size for size, _ in sizes)
    read_codes(
        *addresses,
        *(0 if biases is None else biases.data_ptr(), levels.data_ptr(), out.data_ptr(), log.data_ptr()),
        *(batch * heads, groups * length, head_dim, value_dim, number, key.code.shape[-1], value.code.shape[-1]),
        *(x for size, blocks in sizes for x in (size, size // blocks)),
        *(beside is not None, torch.get_num_threads() if work > _MANY else 1, _WIDEST, scale),
    )
    return Partial(out, log)
