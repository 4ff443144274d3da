"""One layer's attention as plain JSON values, a map or a plan; its tensors are in its `state_dict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linattn.attention import Exact
from linattn.attention.exact.rule import RULES
from linattn.hf.layer_attention import ALL_HEADS, LayerAttention
from linattn.planning.map_records import check_size, describe, rebuild
from linattn.planning.methods import parse_method
from linattn.planning.plans import EXACT, Plan, plan_from_record, plan_record
from linattn.records.fields import Reading

# Keys in a window, keys attended to exactly, numbers in a value: no model has more.
_MOST = 2**20
# Characters of a method's written form.
_LONGEST = 1000


@dataclass(frozen=True)
class _MapRecord:
    """A method for all heads; the rule of its exact part is not written where it is `Exact` itself."""

    feature_map: Any
    window: int | None
    num_heavy: int
    rule: str = Exact.word

    @property
    def exact(self) -> Exact | None:
        """The exact part; None where both sizes say that there is none."""
        if self.rule not in RULES:
            raise ValueError(f"there is no exact part {self.rule!r}, but {', '.join(RULES)}")
        window, num_heavy = self.window, self.num_heavy
        return RULES[self.rule](window, num_heavy) if window is not None or num_heavy else None


@dataclass(frozen=True)
class _PlanRecord:
    """A plan."""

    plan: Any


def describe_attention(attention: LayerAttention) -> dict[str, Any]:
    """The record of a layer's attention."""
    if attention.plan is not None:
        return vars(_PlanRecord(plan_record(attention.plan)))
    group = attention.groups[ALL_HEADS]
    assert group is not None
    exact = group.exact
    sizes = {"window": exact and exact.window, "num_heavy": exact.num_heavy if exact else 0}
    rule = {} if exact is None or exact.word == Exact.word else {"rule": exact.word}
    return {"feature_map": describe(attention.feature_map), **sizes, **rule}


def rebuild_attention(record: Any, module_name: str, *, place: str, remedy: str) -> LayerAttention:
    """The attention of a record, as its constructor leaves it; `place` and `remedy` are for errors."""
    reading, is_plan = Reading(place, remedy), isinstance(record, dict) and "plan" in record
    found: Any = reading.record(_PlanRecord if is_plan else _MapRecord, record)
    plan = plan_from_record(found.plan, f"{place}, plan", remedy) if is_plan else None
    try:
        if plan is not None:
            _check_methods(plan)
            return LayerAttention(plan, module_name)
        _check_counts(window=found.window, num_heavy=found.num_heavy)
        return LayerAttention(rebuild(found.feature_map), module_name, exact=found.exact)
    # RecursionError, a RuntimeError: a record may hold a map in a map in a map.
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{place}: {error}; {remedy}") from error


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
