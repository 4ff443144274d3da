"""Files of plans: what each layer of a model keeps within a budget, as an audit chose it by measured KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from linattn.kv_cache.budget import NEAR
from linattn.kv_cache.config import MergedKV
from linattn.records.json_files import Reading, read_record, to_json, write_json

PLAIN = "sinks + window"
FEW_BITS = (8, 4)
"""Of merged keys that are measured in few bits, beside the first share."""

CHOICES = (PLAIN, *(f"merged keys, {x:.0%} near" for x in NEAR), *(f"merged keys in {x} bits" for x in FEW_BITS))
"""Names of what a plan chooses from, the plain window first: what a converted model can keep."""

_KIND, _VERSION = "linattn memory plan", 3
_REMEDY = "make the plan again, with `linattn audit --budget --plan-out` and a new name"


@dataclass(frozen=True)
class TrialRecord:
    """A `Trial`, as a file has it: names and budgets by layer."""

    choices: list[str]
    budgets: list[Annotated[int, Ge(1)]]
    kl: Annotated[float, Ge(0)]


@dataclass(frozen=True)
class MemoryPlan:
    """The method of each global layer at a budget, and the layer's share of it."""

    model: str  # name or folder
    budget: Annotated[int, Ge(1)]  # in exact keys per layer and key/value head
    num_tokens: Annotated[int, Ge(1)]  # of the passage it was made on
    calibration: str  # source of that passage's text
    calibration_sha256: str  # digest of the text
    layers: list[int]  # their numbers
    choices: list[str]  # name of each layer's method
    budgets: list[Annotated[int, Ge(1)]]  # of each layer, in exact keys
    labels: list[str]  # the methods' written forms
    kl: Annotated[float, Ge(0)]  # measured on the passage
    window_kl: Annotated[float, Ge(0)]  # of the plain window in every layer, on the same passage
    trials: list[TrialRecord]  # all that was measured
    weights_sha256: str | None = None  # digest of the model's weights in its dtype; None in files of earlier versions

    @property
    def label(self) -> str:
        """Every layer's method in its written form, once where all are alike."""
        if len(set(self.labels)) == 1:
            return self.labels[0]
        return "; ".join(f"layer {n}: {label}" for n, label in zip(self.layers, self.labels, strict=True))


def write_memory_plans(path: Path, plans: Sequence[MemoryPlan]) -> None:
    """Write plans, one per budget, by ascending budget, as one JSON file, in one step."""
    write_json(path, {"kind": _KIND, "version": _VERSION, "plans": [to_json(plan) for plan in plans]})


def read_memory_plans(path: Path) -> list[MemoryPlan]:
    """Read what `write_memory_plans` wrote; OSError or ValueError if there is no such file, or it is damaged."""
    records = read_record(path, _KIND, _VERSION, _REMEDY).get("plans")
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no plans; {_REMEDY}")
    plans = [_read(Reading(f"{path}, plan {n}", _REMEDY), plan) for n, plan in enumerate(records)]
    budgets = [plan.budget for plan in plans]
    if len(set(budgets)) < len(budgets):
        raise ValueError(f"{path} holds plans of {budgets} keys, wanted one for each budget; {_REMEDY}")
    return plans


def _read(reading: Reading, values: Any) -> MemoryPlan:
    """A plan, with what its fields must have in common; ValueError for any other."""
    plan = reading.record(MemoryPlan, values)
    for trial in (TrialRecord(plan.choices, plan.budgets, plan.kl), *plan.trials):
        if not plan.layers or not len(plan.layers) == len(trial.choices) == len(trial.budgets):
            got = f"{trial.choices} and {trial.budgets}"
            reading.refuse(f"choices and budgets must be one for each layer of {plan.layers}, got {got}")
        if not set(trial.choices) <= set(CHOICES):
            reading.refuse(f"choices must be among {', '.join(CHOICES)}, got {trial.choices}")
    if sum(plan.budgets) > plan.budget * len(plan.layers):
        reading.refuse(f"budgets must be at most {plan.budget} keys a layer in the mean, got {plan.budgets}")
    if len(plan.labels) != len(plan.layers):
        reading.refuse(f"labels must be one for each layer of {plan.layers}, got {plan.labels}")
    try:
        for label in {label for label, choice in zip(plan.labels, plan.choices, strict=True) if choice != PLAIN}:
            if MergedKV.parse(label).window is None:
                raise ValueError(f"a cache has a window before its merged keys, got {label!r}")
    except ValueError as error:
        reading.refuse(f"labels: {error}")
    if plan.layers[0] < 0 or plan.layers != sorted(set(plan.layers)):
        reading.refuse(f"layers must be different numbers in ascending order, got {plan.layers}")
    return plan
