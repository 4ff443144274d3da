"""One layer's kernel as plain JSON values; its tensors are in its `state_dict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linattn.hf._kernels import Kernel
from linattn.hf.kernel_attention import KernelAttention
from linattn.hf.planned_attention import PlannedAttention
from linattn.planning.json_records import check_fields
from linattn.planning.map_records import describe, rebuild
from linattn.planning.plans import plan_from_record, plan_record


@dataclass(frozen=True)
class _KernelRecord:
    """What a `KernelAttention` was built with."""

    feature_map: dict[str, Any]
    window: int | None
    num_heavy: int


@dataclass(frozen=True)
class _PlannedRecord:
    """What a `PlannedAttention` was built with."""

    plan: dict[str, Any]


def describe_kernel(kernel: Kernel) -> dict[str, Any]:
    """The record of a kernel."""
    if isinstance(kernel, PlannedAttention):
        return vars(_PlannedRecord(plan_record(kernel.plan)))
    return vars(_KernelRecord(describe(kernel.feature_map), kernel.window, kernel.num_heavy))


def rebuild_kernel(record: Any, module_name: str, *, place: str, remedy: str) -> Kernel:
    """The kernel of a record, as its constructor leaves it; `place` and `remedy` are for errors."""
    if isinstance(record, dict) and "plan" in record:
        planned = check_fields(record, _PlannedRecord, place, remedy)
        plan = plan_from_record(planned["plan"], f"{place}, plan", remedy)
        try:
            return PlannedAttention(plan, module_name)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place}: {error}; {remedy}") from error
    checked = check_fields(record, _KernelRecord, place, remedy)
    try:
        feature_map = rebuild(checked["feature_map"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}; {remedy}") from error
    return KernelAttention(feature_map, module_name, window=checked["window"], num_heavy=checked["num_heavy"])
