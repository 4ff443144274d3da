"""One layer's kernel as plain JSON values; its tensors are in its `state_dict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linattn.hf.kernel_attention import KernelAttention
from linattn.planning.json_records import check_fields
from linattn.planning.map_records import describe, rebuild


@dataclass(frozen=True)
class _KernelRecord:
    """What a `KernelAttention` was built with."""

    feature_map: dict[str, Any]
    window: int | None
    num_heavy: int


def describe_kernel(kernel: KernelAttention) -> dict[str, Any]:
    """The record of a kernel."""
    return vars(_KernelRecord(describe(kernel.feature_map), kernel.window, kernel.num_heavy))


def rebuild_kernel(record: Any, module_name: str, *, place: str, remedy: str) -> KernelAttention:
    """The kernel of a record, as its constructor leaves it; `place` and `remedy` are for errors."""
    checked = check_fields(record, _KernelRecord, place, remedy)
    try:
        feature_map = rebuild(checked["feature_map"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}; {remedy}") from error
    return KernelAttention(feature_map, module_name, window=checked["window"], num_heavy=checked["num_heavy"])
