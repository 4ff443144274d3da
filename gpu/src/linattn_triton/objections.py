"""Why the kernels cannot run a call."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from linattn.attention.backends.backend import Call

# Dtypes whose blocks of vectors up to 256 wide stay in registers, and the oldest GPUs with products of bfloat16.
_DTYPES, WIDEST = (torch.bfloat16, torch.float16, torch.float32), 256
_OLDEST = (8, 0)


def objections(call: Call) -> list[str]:
    """Every reason, each with what to do about it."""
    device, dtype, value_dim = call.query.device, call.query.dtype, call.value.shape[-1]
    reasons = []
    if place := _reason(device):
        reasons.append(place)
    if dtype not in _DTYPES:
        reasons.append(f"it takes float32, bfloat16 and float16, and the tensors are {dtype}")
    if call.bound.is_grouped:
        name = type(call.bound.feature_map).__name__
        reasons.append(f"it has no kernels for maps whose queries read one group of the features, as {name}")
    if not 0 < value_dim <= WIDEST:
        reasons.append(f"it takes values of width 1 to {WIDEST}, and these have {value_dim}")
    return reasons


def _reason(device: torch.device) -> str:
    """Why nothing can run there, or ""."""
    if torch.compiler.is_compiling():
        # Imported here: torch's marks for its compiler import the compiler.
        from linattn_triton._constants import constant_reason

        words: str = constant_reason(str(device))
        return words
    return reason(str(device))


@cache
def reason(device: str) -> str:
    """Why nothing can run on a device, or ""."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    place = torch.device(device)
    if place.type == "cuda" and (capability := torch.cuda.get_device_capability(place)) < _OLDEST:
        return f"its kernels need compute capability {_OLDEST}, and {device} has {capability}"
    if place.type != "cuda" and not is_interpreted():
        return f"its kernels run on CUDA GPUs, and the tensors are on {device}"
    return ""


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on the CPU, as tests have it."""
    # Imported here: only Triton knows.
    from linattn_triton.tiles import IS_INTERPRETED

    return IS_INTERPRETED
