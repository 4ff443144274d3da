"""Constants of a compiled graph: whether a package of kernels is installed."""

from __future__ import annotations

import torch

from linattn.softmax.extensions import missing


@torch.compiler.assume_constant_result
def constant_missing(package: str) -> str:
    """`missing`, found while the graph is made."""
    return missing(package)
