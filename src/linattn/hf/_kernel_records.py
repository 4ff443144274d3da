"""One layer's kernel as plain JSON values; its tensors are in its `state_dict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linattn.attention import Exact
from linattn.hf._kernels import Kernel
from linattn.hf.kernel_attention import KernelAttention
from linattn.hf.planned_attention import PlannedAttention
from linattn.planning.json_records import check_fields
from linattn.planning.map_records import check_size, describe, rebuild
from linattn.planning.methods import parse_method
from linattn.planning.plans import EXACT, Plan, plan_from_record, plan_record

# Keys in a window, keys attended to exactly, numbers in a value: what is beyond is no model's.
_MOST = 2**20
# Characters of a method's written form.
_LONGEST = 1000


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
    sizes = (kernel.exact.window, kernel.exact.num_heavy) if kernel.exact else (None, 0)
    return vars(_KernelRecord(describe(kernel.feature_map), *sizes))


def rebuild_kernel(record: Any, module_name: str, *, place: str, remedy: str) -> Kernel:
    """The kernel of a record, as its constructor leaves it; `place` and `remedy` are for errors."""
    if isinstance(record, dict) and "plan" in record:
        planned = check_fields(record, _PlannedRecord, place, remedy)
        plan = plan_from_record(planned["plan"], f"{place}, plan", remedy)
        try:
            _check_methods(plan)
            return PlannedAttention(plan, module_name)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{place}: {error}; {remedy}") from error
    checked = check_fields(record, _KernelRecord, place, remedy)
    try:
        _check_counts(window=checked["window"], num_heavy=checked["num_heavy"])
        window, num_heavy = checked["window"], checked["num_heavy"]
        exact = Exact(window, num_heavy) if window is not None or num_heavy else None
        feature_map = rebuild(checked["feature_map"])
    # A record may hold a map in a map in a map.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}; {remedy}") from error
    return KernelAttention(feature_map, module_name, exact=exact)


def _check_methods(plan: Plan) -> None:
    """Refuse methods that would hold more than any model's, before they are built."""
    _check_counts(value_dim=plan.value_dim)
    for label in plan.groups:
        if len(label) > _LONGEST:
            raise ValueError(f"a method of {len(label)} characters is none of linattn's")
        if label != EXACT:
            method = parse_method(label)
            _check_counts(**(vars(method.exact) if method.exact else {}))
            check_size(method.map.name, {"head_dim": plan.head_dim, **dict(method.map.options)})


def _check_counts(**counts: int | None) -> None:
    """Refuse sizes beyond any model's."""
    for name, count in counts.items():
        if count is not None and count > _MOST:
            raise ValueError(f"{name} is {count}, which is beyond any model's; at most {_MOST} is read")
