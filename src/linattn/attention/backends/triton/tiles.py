"""Which sizes the kernels run with, and what they are compiled for. Letters as in triton/__init__.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from linattn.attention.backends.triton.blocks import Shape, operand

# Whether Triton interprets the kernels on the CPU, as TRITON_INTERPRET=1 has it: for tests.
IS_INTERPRETED = not isinstance(operand, triton.JITFunction)


def sizes(wide: int, dtype: torch.dtype) -> tuple[int, int]:
    """Features F of a tile and tokens C of a block, for heads up to so wide."""
    if dtype == torch.bfloat16:
        return (64, 64) if wide <= 128 else (32, 64)
    return 32, 32


def options(kernel: str, shape: Shape) -> dict[str, int]:
    """Warps and stages of a kernel."""
    wide = max(shape.padded_d, shape.padded_dv)
    if shape.operand == tl.bfloat16 and wide <= 64 and kernel != "key_gradients":
        return {"num_warps": 4, "num_stages": 2}
    return {"num_warps": 8 if wide > 64 or shape.operand == tl.bfloat16 else 4, "num_stages": 1}


def shape_of(kind: str, d: int, dv: int, num_features: int, dtype: torch.dtype) -> Shape:
    """What a call's kernels are compiled for; float16 is multiplied as float32, whose range its features need."""
    is_short, d = dtype == torch.bfloat16, d if kind == "powers" else 1
    features, tokens = sizes(max(d, dv), dtype)
    return Shape(
        d=d,
        padded_d=padded(d),
        dv=dv,
        padded_dv=padded(dv),
        num_features=num_features,
        tile=features,
        num_tiles=triton.cdiv(num_features, features),
        block=tokens,
        kind=kind,
        operand=tl.bfloat16 if is_short else tl.float32,
        precision="tf32" if dtype == torch.float16 else "ieee",
        emulated=is_short and IS_INTERPRETED,
    )


def padded(width: int) -> int:
    """The next power of two, at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(width))
