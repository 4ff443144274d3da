"""Why the kernels cannot run a call."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from linattn.attention.backends.backend import Call

# The widest values that a block of sums has room for, and the oldest GPUs with products of bfloat16.
_WIDEST, _OLDEST = 256, (8, 0)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def objections(call: Call) -> list[str]:
    """Every reason, each with what to do about it."""
    bound, query, _, value, *_ = call
    found = [] if is_there() else ["Triton is not installed (pip install triton)"]
    if query.device.type != "cuda" and not (is_there() and is_interpreted()):
        found.append(f"its kernels run on CUDA GPUs, and the tensors are on {query.device}")
    elif query.device.type == "cuda" and (capability := _capability(query.device)) < _OLDEST:
        found.append(f"its kernels need compute capability {_OLDEST}, and {query.device} has {capability}")
    if query.dtype not in _DTYPES:
        found.append(f"it takes float32, bfloat16 and float16, and the tensors are {query.dtype}")
    if bound.is_grouped:
        found.append("it has no kernel for maps whose queries read one group of the features, as Expansion's do")
    if not 0 < value.shape[-1] <= _WIDEST:
        found.append(f"it takes values of width 1 to {_WIDEST}, and these have {value.shape[-1]}")
    return found


@cache
def is_there() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


@cache
def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on the CPU, as tests have it."""
    # Imported here: only Triton knows.
    from linattn.attention.backends.triton.tiles import IS_INTERPRETED

    return IS_INTERPRETED


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)
