"""The precision in which attention is computed."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

LOG2_E = math.log2(math.e)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, exponents and divisions run in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast; entering one where none is at work would cost a single token a tenth of its time."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
