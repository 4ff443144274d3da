"""Plans of a constant memory: which contender each global layer takes at a budget of bytes, by measured KL.

Made on one passage and measured on others. Every step is checked end to end on the whole model, and the plain window is
among the candidates: a plan departs from it only for a KL that is lower by a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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

_KIND, _VERSION = "linattn memory plan", 1
_REMEDY = "make the plan again, with `linattn audit --budget --plan-out`"


class Trial(NamedTuple):
    """What was measured end to end.

    Attributes:
        choices: a candidate for each layer.
        kl: from the exact model.
    """

    choices: tuple[str, ...]
    kl: float


def choose(candidates: Sequence[str], num_layers: int, measure: Callable[[tuple[str, ...]], float]) -> list[Trial]:
    """Try candidates in all layers, then the runner-up in single layers, and say what was measured; the best is first.

    Cost: a measurement per candidate, and one per layer.

    Args:
        candidates: names, the plain window first.
        num_layers: of the model that attend to all tokens.
        measure: the KL of a candidate for each layer.

    Returns:
        All trials. The first is the choice: the least KL, or the plain window's where that is within the margin.

    Example:
        >>> kl = {"window": 0.2, "merged": 0.1}
        >>> found = choose(["window", "merged"], 2, lambda names: kl[names[0]] + kl[names[1]] / 2)
        >>> found[0]
        Trial(choices=('merged', 'merged'), kl=0.15000000000000002)
        >>> choose(["window", "merged"], 2, lambda names: 0.2)[0].choices  # no better: the window stays
        ('window', 'window')
    """
    trials = [Trial((name,) * num_layers, measure((name,) * num_layers)) for name in candidates]
    plain, ranked = trials[0], sorted(trials, key=lambda trial: trial.kl)
    best = ranked[0]
    others = [trial.choices[0] for trial in ranked[1 : 1 + _RUNNERS_UP]]
    for place in range(num_layers):
        for name in others:
            choices = (*best.choices[:place], name, *best.choices[place + 1 :])
            if any(trial.choices == choices for trial in trials):
                continue
            trial = Trial(choices, measure(choices))
            trials.append(trial)
            best = min(best, trial, key=lambda one: one.kl)
    chosen = best if best.kl <= MARGIN * plain.kl else plain
    return [chosen, *(trial for trial in trials if trial is not chosen)]


@dataclass(frozen=True)
class TrialRecord:
    """A `Trial`, as a file has it."""

    choices: list[str]
    kl: float


@dataclass(frozen=True)
class MemoryPlan:
    """The contender of each global layer at a budget.

    Attributes:
        model: the model's name or folder.
        budget: in exact keys per layer and key/value head.
        num_tokens: of the passage it was made on.
        calibration: source of that passage's text.
        calibration_sha256: digest of the text.
        layers: numbers of the layers.
        choices: name of each layer's contender.
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
    return [Reading(f"{path}, plan {n}", _REMEDY).record(MemoryPlan, plan) for n, plan in enumerate(found)]
