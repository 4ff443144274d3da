"""Constants of a compiled graph: functions that read values, which a graph may not."""

from __future__ import annotations

import torch

from linattn.feature_maps._base import live_map


@torch.compiler.assume_constant_result
def constant_fingerprint(handle: int, *followed: str) -> str:
    """A map's `fingerprint`, found while the graph is made."""
    return live_map(handle).read_fingerprint(followed)
