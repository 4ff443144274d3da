"""Why the kernels cannot run a call."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from linattn.attention.backends.backend import Call
from linattn.feature_maps import Expansion

# Dtypes whose blocks of vectors up to 256 wide stay in registers, and the oldest GPUs with products of bfloat16.
_DTYPES, WIDEST = (torch.bfloat16, torch.float16, torch.float32), 256
_OLDEST = (8, 0)
# A centre's part of a state, D × Dv sums, stays in the registers of one program: at 256 × 256 these are all there are.
_WIDEST_CENTRE = 128


def objections(call: Call) -> list[str]:
    """Every reason, each with what to do about it."""
    device, dtype, value_dim = call.query.device, call.query.dtype, call.value.shape[-1]
    found = []
    if place := _reason(device):
        found.append(place)
    if dtype not in _DTYPES:
        found.append(f"it takes float32, bfloat16 and float16, and the tensors are {dtype}")
    if call.bound.is_grouped:
        found += _of_groups(call)
    widest = _WIDEST_CENTRE if call.bound.is_grouped else WIDEST
    if not 0 < value_dim <= widest:
        found.append(f"it takes values of width 1 to {widest}, and these have {value_dim}")
    return found


def _of_groups(call: Call) -> list[str]:
    """Reasons against maps whose queries read one group of the features."""
    found, feature_map = [], call.bound.feature_map
    if not isinstance(feature_map, Expansion):
        return ["of maps whose queries read one group of the features it has kernels for Expansion alone"]
    if feature_map.order == 2:
        found.append("it has kernels for expansions of order 0 and 1, whose sums for a centre stay in registers")
    if feature_map.head_dim > _WIDEST_CENTRE:
        found.append(f"it takes expansions of heads up to {_WIDEST_CENTRE} wide, and this has {feature_map.head_dim}")
    if call.bound.tensors and feature_map.centres is not None:
        found.append("it takes an expansion's centres as constants, and gradients follow these")
    return found


def _reason(device: torch.device) -> str:
    """Why nothing can run there, or ""."""
    if torch.compiler.is_compiling():
        # Imported here: torch's marks for its compiler import the compiler.
        from linattn.attention.backends.triton._constants import constant_reason

        found: str = constant_reason(str(device))
        return found
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
    from linattn.attention.backends.triton.tiles import IS_INTERPRETED

    return IS_INTERPRETED
