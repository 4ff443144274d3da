"""Plans of a constant memory: which contender each global layer takes, of what share of the bytes, by measured KL.

Made on one passage and measured on others. Every step is checked end to end on the whole model, and the plain window is
among the candidates: a plan departs from it only for a KL that is lower by a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from linattn.attention.exact import parse_exact
from linattn.lab.contenders.shelf import FEW_BITS, NEAR
from linattn.records.fields import Reading, to_json
from linattn.records.json_files import read_record, write_json

PLAIN = "sinks + window"
CANDIDATES = (
    PLAIN,
    *(f"merged keys, {near:.0%} near" for near in NEAR),
    *(f"merged keys in {bits} bits" for bits in FEW_BITS),
)
"""Names of what a plan chooses from, the plain window first: what a converted model can keep."""

MARGIN = 0.95
"""A plan departs from the plain window for a KL of at most this share of the window's."""

# How many candidates beside the best are tried in single layers.
_RUNNERS_UP = 1

_KIND, _VERSION = "linattn memory plan", 2
_REMEDY = "make the plan again, with `linattn audit --budget --plan-out`"


class Choice(NamedTuple):
    """What a layer keeps.

    Attributes:
        name: of a candidate.
        num_keys: the layer's own budget, in exact keys.
    """

    name: str
    num_keys: int


class Trial(NamedTuple):
    """What was measured end to end.

    Attributes:
        choices: of each layer.
        kl: from the exact model.
    """

    choices: tuple[Choice, ...]
    kl: float


Measure = Callable[[tuple[Choice | None, ...]], float]
"""The KL of a choice for each layer, None for exact attention; inf where the bytes are too few for a candidate."""


def choose(
    candidates: Sequence[str], num_layers: int, budget: int, measure: Measure, *, is_common: bool = False
) -> list[Trial]:
    """Try candidates in all layers, then shares of the bytes, then the runner-up in single layers; the best is first.

    In every trial the layers have at most num_layers·budget keys' bytes. The plain window is one for all layers: what
    departs from it has none of it.

    Cost: a measurement per candidate, two per layer, and one.

    Args:
        candidates: names, the plain window first.
        num_layers: of the model that attend to all tokens.
        budget: in exact keys, per layer.
        measure: what was measured of choices.
        is_common: whether all layers are to have the same, of which each candidate is a trial.

    Returns:
        All trials that could be measured. The first is the choice: the least KL, or the plain window's where that is
        within the margin.

    Example:
        >>> def measure(choices):  # the first layer forgets four times as much, each half of it with twice the bytes
        ...     forgets = zip((0.4, 0.1), choices)
        ...     return sum(x * {"window": 16, "merged": 8}[one.name] / one.num_keys for x, one in forgets if one)
        >>> found = choose(["window", "merged"], 2, 16, measure)
        >>> found[0].choices
        (Choice(name='merged', num_keys=21), Choice(name='merged', num_keys=10))
        >>> [round(trial.kl, 3) for trial in found]
        [0.232, 0.5, 0.25]
        >>> choose(["window", "merged"], 2, 16, lambda _: 0.2)[0].choices[0]  # no better: the window stays
        Choice(name='window', num_keys=16)
    """
    trials: dict[tuple[Choice, ...], float] = {}

    def tried(choices: tuple[Choice, ...]) -> Trial:
        """Measured, once."""
        if choices not in trials:
            trials[choices] = measure(choices)
        return Trial(choices, trials[choices])

    alike = [tried((Choice(name, budget),) * num_layers) for name in candidates]
    plain, *others = alike
    others.sort(key=lambda trial: trial.kl)
    best = others[0]
    if num_layers > 1 and not is_common and best.kl < math.inf:
        one = best.choices[0]
        alone = [measure(tuple(one if place == n else None for n in range(num_layers))) for place in range(num_layers)]
        split = tuple(Choice(one.name, num_keys) for num_keys in shares(budget, alone))
        best = min(best, tried(split), key=lambda trial: trial.kl)
        for place in range(num_layers):
            for runner_up in others[1 : 1 + _RUNNERS_UP]:
                own = Choice(runner_up.choices[0].name, best.choices[place].num_keys)
                best = min(
                    best, tried((*best.choices[:place], own, *best.choices[place + 1 :])), key=lambda trial: trial.kl
                )
    chosen = best if best.kl <= MARGIN * plain.kl else plain
    rest = (Trial(choices, kl) for choices, kl in trials.items() if kl < math.inf)
    return [chosen, *(trial for trial in rest if trial != chosen)]


def shares(budget: int, alone: Sequence[float]) -> list[int]:
    """Keys of each layer, of which all have len(alone)·budget at most, by the KL of each where it alone is bounded.

        n_l in proportion to √KL_l,   but no fewer than a quarter of the budget

    Where KL_l falls as 1/n_l and the layers' sum, that is the least of the sum. The bound keeps what one text shows not
    to need, and another may.

    Example:
        >>> shares(512, [0.016, 0.011, 0.0001])
        [769, 638, 128]
        >>> shares(512, [0.0, 0.0])
        [512, 512]
    """
    roots, least = [max(kl, 0.0) ** 0.5 for kl in alone], max(budget // 4, 1)
    few: set[int] = set()
    while True:
        left, total = len(roots) * budget - least * len(few), sum(x for n, x in enumerate(roots) if n not in few)
        found = [
            least if n in few else int(left * x / total) if total > 0 else left // (len(roots) - len(few))
            for n, x in enumerate(roots)
        ]
        fewer = {n for n, keys in enumerate(found) if keys < least}
        if not fewer:
            return found
        few |= fewer


@dataclass(frozen=True)
class TrialRecord:
    """A `Trial`, as a file has it: names and budgets by layer."""

    choices: list[str]
    budgets: list[int]
    kl: float


@dataclass(frozen=True)
class MemoryPlan:
    """The contender of each global layer at a budget, and the layer's share of it.

    Attributes:
        model: the model's name or folder.
        budget: in exact keys per layer and key/value head.
        num_tokens: of the passage it was made on.
        calibration: source of that passage's text.
        calibration_sha256: digest of the text.
        layers: numbers of the layers.
        choices: name of each layer's contender.
        budgets: of each layer, in exact keys.
        labels: their written forms.
        kl: measured on the passage.
        window_kl: of the plain window in every layer, on the same passage.
        trials: all that was measured.
    """

    model: str
    budget: int
    num_tokens: int
    calibration: str
    calibration_sha256: str
    layers: list[int]
    choices: list[str]
    budgets: list[int]
    labels: list[str]
    kl: float
    window_kl: float
    trials: list[TrialRecord]

    @property
    def label(self) -> str:
        """Every layer's contender in its written form, once where all are alike."""
        if len(set(self.labels)) == 1:
            return self.labels[0]
        return "; ".join(f"layer {n}: {label}" for n, label in zip(self.layers, self.labels, strict=True))


def write_memory_plans(path: Path, plans: Sequence[MemoryPlan]) -> None:
    """Write plans, one per budget, as one JSON file, in one step.

    Args:
        path: the file.
        plans: by ascending budget.

    Raises:
        OSError: if the file cannot be written.
    """
    write_json(path, {"kind": _KIND, "version": _VERSION, "plans": [to_json(plan) for plan in plans]})


def read_memory_plans(path: Path) -> list[MemoryPlan]:
    """Read what `write_memory_plans` wrote.

    Args:
        path: the file.

    Returns:
        The plans, in order.

    Raises:
        OSError, ValueError: if there is no such file, or it is damaged.
    """
    found = read_record(path, _KIND, _VERSION, _REMEDY).get("plans")
    if not isinstance(found, list):
        raise ValueError(f"{path} holds no plans; {_REMEDY}")
    plans = [_read(Reading(f"{path}, plan {n}", _REMEDY), plan) for n, plan in enumerate(found)]
    budgets = [plan.budget for plan in plans]
    if len(set(budgets)) < len(budgets):
        raise ValueError(f"{path} holds plans of {budgets} keys, wanted one for each budget; {_REMEDY}")
    return plans


def _read(reading: Reading, values: Any) -> MemoryPlan:
    """A plan, with what its fields must have in common; ValueError for any other."""
    plan = reading.at_least(reading.record(MemoryPlan, values), budget=1, num_tokens=1, window_kl=0.0)
    for trial in (TrialRecord(plan.choices, plan.budgets, plan.kl), *plan.trials):
        reading.at_least(trial, kl=0.0)
        if not plan.layers or not len(plan.layers) == len(trial.choices) == len(trial.budgets):
            raise ValueError(
                f"{reading.place}: choices and budgets must be one for each layer of {plan.layers}, got "
                f"{trial.choices} and {trial.budgets}; {reading.remedy}"
            )
        if not set(trial.choices) <= set(CANDIDATES) or min(trial.budgets) < 1:
            raise ValueError(
                f"{reading.place}: choices must be among {', '.join(CANDIDATES)}, and budgets at least 1, got "
                f"{trial.choices} and {trial.budgets}; {reading.remedy}"
            )
    if len(plan.labels) != len(plan.layers):
        raise ValueError(
            f"{reading.place}: labels must be one for each layer of {plan.layers}, got {plan.labels}; {reading.remedy}"
        )
    try:
        for label in {label for label, choice in zip(plan.labels, plan.choices, strict=True) if choice != PLAIN}:
            parse_exact(label)
    except ValueError as error:
        raise ValueError(f"{reading.place}: labels: {error}; {reading.remedy}") from None
    if plan.layers[0] < 0 or plan.layers != sorted(set(plan.layers)):
        raise ValueError(
            f"{reading.place}: layers must be different numbers in ascending order, got {plan.layers}; {reading.remedy}"
        )
    return plan
