"""What stands in the place of a layer's softmax: one map for all heads, or a method for each."""

from __future__ import annotations

from torch import nn

from linattn.hf.kernel_attention import KernelAttention
from linattn.hf.planned_attention import PlannedAttention

Kernel = KernelAttention | PlannedAttention

KERNEL = "linear_attention"
"""Name of the kernel in its attention module."""


def kernel_of(module: nn.Module) -> Kernel | None:
    """What `linearize_` put into a module, if anything."""
    kernel = getattr(module, KERNEL, None)
    return kernel if isinstance(kernel, Kernel) else None
