"""One layer's attention as plain JSON values, a map or a plan; its tensors are in its `state_dict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linattn.attention import Exact
from linattn.attention.exact import parse_exact
from linattn.hf.layer_attention import ALL_HEADS, LayerAttention
from linattn.planning.json_records import check_fields
from linattn.planning.map_records import check_size, describe, rebuild
from linattn.planning.methods import parse_method
from linattn.planning.plans import EXACT, Plan, plan_from_record, plan_record

# Keys in a window, keys attended to exactly, numbers in a value: no model has more.
_MOST = 2**20
# Characters of a method's written form.
_LONGEST = 1000


@dataclass(frozen=True)
class _MapRecord:
    """A method for all heads."""

    feature_map: dict[str, Any]
    window: int | None
    num_heavy: int


@dataclass(frozen=True)
class _RuleRecord:
    """A method for all heads, its exact part by another rule of eviction, in its written form."""

    feature_map: dict[str, Any]
    exact: str


@dataclass(frozen=True)
class _PlanRecord:
    """A plan."""

    plan: dict[str, Any]


def describe_attention(attention: LayerAttention) -> dict[str, Any]:
    """The record of a layer's attention."""
    if attention.plan is not None:
        return vars(_PlanRecord(plan_record(attention.plan)))
    group = attention.groups[ALL_HEADS]
    assert group is not None
    feature_map, exact = describe(attention.feature_map), group.exact
    if exact is None:
        return vars(_MapRecord(feature_map, None, 0))
    if type(exact) is Exact:
        return vars(_MapRecord(feature_map, exact.window, exact.num_heavy))
    return vars(_RuleRecord(feature_map, exact.label))


def rebuild_attention(record: Any, module_name: str, *, place: str, remedy: str) -> LayerAttention:
    """The attention of a record, as its constructor leaves it; `place` and `remedy` are for errors."""
    names = record if isinstance(record, dict) else {}
    kind = _PlanRecord if "plan" in names else _RuleRecord if "exact" in names else _MapRecord
    found = check_fields(record, kind, place, remedy)
    plan = plan_from_record(found["plan"], f"{place}, plan", remedy) if kind is _PlanRecord else None
    try:
        if plan is not None:
            _check_methods(plan)
            return LayerAttention(plan, module_name)
        exact = parse_exact(found["exact"]) if kind is _RuleRecord else _exact_part(found["window"], found["num_heavy"])
        _check_counts(**(vars(exact) if exact else {}))
        return LayerAttention(rebuild(found["feature_map"]), module_name, exact=exact)
    # RecursionError, a RuntimeError: a record may hold a map in a map in a map.
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{place}: {error}; {remedy}") from error


def _exact_part(window: int | None, num_heavy: int) -> Exact | None:
    """The exact part of these sizes; None where both say that there is none."""
    return Exact(window, num_heavy) if window is not None or num_heavy else None


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
