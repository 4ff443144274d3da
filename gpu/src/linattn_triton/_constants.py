"""Constants of a compiled graph: whether a device can run the kernels."""

from __future__ import annotations

import torch

from linattn_triton.objections import reason


@torch.compiler.assume_constant_result
def constant_reason(device: str) -> str:
    """`reason`, found while the graph is made."""
    return reason(device)
