"""What a compiled graph holds as a constant: functions that read values, which a graph may not."""

from __future__ import annotations

import torch

from linattn.feature_maps._base import tensor_digest


@torch.compiler.assume_constant_result
def constant_tensor_digest(handle: int, *names: str) -> str:
    """`tensor_digest`, found while the graph is made."""
    return tensor_digest(handle, *names)
