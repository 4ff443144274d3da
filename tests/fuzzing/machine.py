"""Sizes that may change speed but never a result: blocks, segments, chunks, the limit of the jump guard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fuzzing.dice import Dice
from linattn.attention import rows
from linattn.attention.backends.blocked import blocks, causal, grouped
from linattn.attention.window import calls, neighbourhood
from linattn.feature_maps import base
from linattn.softmax import attention


def draw_machine(dice: Dice) -> dict[str, int]:
    """Sizes by name; none of them leaves a machine as it is."""
    if dice.chance(0.3):
        return {}
    sizes = {"block": dice.pick(1, 2, 3, 4, 7, 8, 16)}
    for name, options in {
        "segment": (1, 2, 3),
        "tiles": (1, 50, 400),
        "smallest tile": (1, 2),
        "largest tile": (8, 16),
        "turned": (1, 4, 8),
        "near": (1, 100, 1000),
        "read": (1, 30, 300),
        "rows": (1, 100),
        "piece": (1, 64),
        "fewest": (1, 3),
    }.items():
        if dice.chance(0.5):
            sizes[name] = dice.pick(*options)
    if dice.chance(0.2):
        sizes["jump"] = dice.pick(0, 1, 20)
    return sizes


@contextlib.contextmanager
def machine_of(sizes: dict[str, int]) -> Iterator[None]:
    """These sizes while it lasts."""
    changed: list[tuple[Any, str, Any]] = []

    def put(module: Any, name: str, value: Any) -> None:
        changed.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def block_size(*_: Any, span: int = 0, is_causal: bool = False) -> int:
        return -(-sizes["block"] // span) * span if span else sizes["block"]

    single = {
        "tiles": (grouped, "_CHUNK"),
        "smallest tile": (grouped, "_SMALLEST"),
        "largest tile": (grouped, "_LARGEST"),
        "segment": (causal, "SEGMENT"),
        "turned": (calls, "_SEGMENT"),
        "near": (neighbourhood, "_CHUNK"),
        "read": (attention, "_CHUNK"),
        "rows": (rows, "_BUDGET"),
        "piece": (base, "_PIECE"),
        "fewest": (base, "_FEWEST"),
        "jump": (causal, "_MAX_JUMP"),
    }
    try:
        for name, size in sizes.items():
            if name == "block":
                put(blocks, "block_size", block_size)
            else:
                put(*single[name], size)
        yield
    finally:
        for module, name, value in reversed(changed):
            setattr(module, name, value)


def unit(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are promised to run in for inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
