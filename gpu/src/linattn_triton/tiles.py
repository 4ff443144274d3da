"""Which sizes the kernels run with, and what they are compiled for. Letters as in linattn_triton."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from linattn_triton.kernels.blocks import Shape, operand

# Whether Triton interprets the kernels on the CPU, as TRITON_INTERPRET=1 has it: for tests.
IS_INTERPRETED = not isinstance(operand, triton.JITFunction)


# Kernels that hold the most at once.
_ROW_GRADIENTS = ("query_gradients", "key_gradients")


class Tuning(NamedTuple):
    """How one kernel runs: features F of a tile, warps, stages; whether it loads vectors and values for every tile."""

    tile: int
    num_warps: int
    num_stages: int
    reloads: bool = False


def sizes(wide: int, dtype: torch.dtype, *, is_backward: bool) -> tuple[int, int]:
    """The most features of a tile, and the tokens C of a block, for heads up to so wide."""
    if dtype == torch.bfloat16:
        return (64 if wide <= 128 else 32), (32 if is_backward and wide > 128 else 64)
    if wide > 64:
        return 32, 16
    return (32, 16 if is_backward else 64) if dtype == torch.float16 else (32, 32)


def tuned(kernel: str, shape: Shape, capability: tuple[int, int]) -> tuple[Shape, Tuning]:
    """Sizes that hold a kernel's sums in registers and its operands in shared memory, on a GPU of this capability.

    Chosen by what the compiler reports, not by time: see tests/laws/test_triton_compiled.py.
    """
    is_wide = max(shape.padded_d, shape.padded_dv) > 128
    if is_wide and shape.precision == "tf32" and kernel in _ROW_GRADIENTS and capability[0] == 8:
        # TF32's operands are held once in every warp, and vectors so wide find no room beside a tile's.
        shape = shape._replace(precision="ieee")
    tuning = _token_step(shape) if kernel == "token_step" else _by_block(kernel, shape, capability)
    tuning = tuning._replace(tile=min(tuning.tile, shape.tile))
    return shape._replace(tile=tuning.tile, reloads=tuning.reloads), tuning


def _token_step(shape: Shape) -> Tuning:
    """Of one token's kernel: two stages keep wide tiles of W out of registers."""
    is_exact = shape.operand == tl.float32 and shape.padded_d > 64
    return Tuning(16 if is_exact else shape.tile, 4, 2 if shape.precision == "ieee" and shape.padded_d > 128 else 1)


def _by_block(kernel: str, shape: Shape, capability: tuple[int, int]) -> Tuning:
    """Of the kernels of blocks of tokens."""
    wide = max(shape.padded_d, shape.padded_dv)
    if shape.operand != tl.bfloat16:
        if wide > 128:
            return Tuning(16, 8, 2 if kernel == "key_offsets" else 1, reloads=True)
        if wide > 64 and shape.precision == "ieee":
            return Tuning(16, 8, 1)
        if wide > 64 and kernel in _ROW_GRADIENTS:
            # With one stage the next tile's operands wait in registers, and these are too few.
            return Tuning(16, 8, 3, reloads=True)
        if wide > 64:
            return Tuning(32, 8, 1)
        return Tuning(shape.tile, 4 if shape.precision == "tf32" and shape.block == 16 else 8, 1)
    if kernel == "key_gradients":
        return Tuning(64 if wide <= 64 and capability >= (9, 0) else 16, 8, 1)
    if wide <= 64:
        # With two stages the compiler fails on the offsets for the newest GPUs.
        return Tuning(64, 4, 1 if kernel == "key_offsets" else 2)
    if kernel == "query_gradients" or (kernel == "row_outputs" and capability < (9, 0)):
        return Tuning(32 if wide <= 128 else 16, 8, 1)
    return Tuning(shape.tile, 8, 1)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; an interpreter has any."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def shape_of(kind: str, d: int, dv: int, num_features: int, dtype: torch.dtype, *, is_backward: bool) -> Shape:
    """Shape of a call's kernels; float16 is multiplied as float32, whose range its features need."""
    is_short, d = dtype == torch.bfloat16, d if kind == "powers" else 1
    features, tokens = sizes(max(d, dv), dtype, is_backward=is_backward)
    features = min(features, padded(num_features))
    return Shape(
        d=d,
        padded_d=padded(d),
        dv=dv,
        padded_dv=padded(dv),
        num_features=num_features,
        total=triton.cdiv(num_features, features) * features,
        tile=features,
        block=tokens,
        kind=kind,
        operand=tl.bfloat16 if is_short else tl.float32,
        precision="tf32" if dtype == torch.float16 else "ieee",
        reloads=False,
        emulated=is_short and IS_INTERPRETED,
    )


def padded(width: int) -> int:
    """The next power of two, at least what a matrix instruction takes."""
    return max(16, 1 << (width - 1).bit_length())
