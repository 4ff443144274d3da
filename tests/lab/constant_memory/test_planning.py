"""Plans of a constant memory: the least measured KL, and never worse than a plain window."""

from __future__ import annotations

import itertools

import pytest
import torch

from linattn.lab.audit.text import Text
from linattn.lab.constant_memory.measuring import MemoryAudit
from linattn.lab.constant_memory.planning import (
    MARGIN,
    PLAIN,
    choose,
    read_memory_plans,
    write_memory_plans,
)
from linattn.lab.constant_memory.records import PLANNED, PassageRow

NAMES = (PLAIN, "one", "two")


@pytest.mark.parametrize("seed", range(20))
def test_never_worse_than_a_plain_window_and_the_least_of_what_was_tried(seed):
    draw = torch.Generator().manual_seed(seed)
    kl = {choices: float(torch.rand((), generator=draw)) for choices in itertools.product(NAMES, repeat=3)}
    found = choose(NAMES, 3, kl.__getitem__)
    assert all(trial.kl == kl[trial.choices] for trial in found)
    plain = kl[(PLAIN,) * 3]
    assert found[0].kl <= plain
    least = min(trial.kl for trial in found)
    assert found[0].kl == (least if least <= MARGIN * plain else plain)
    # One more for each layer, but what was measured already.
    assert len({trial.choices for trial in found}) == len(found) <= len(NAMES) + 3
    assert {(name,) * 3 for name in NAMES} <= {trial.choices for trial in found}


def test_a_layer_of_its_own_is_found():
    # "one" is best in all layers but the second, where the runner-up is.
    cost = {(0, "one"): 1, (1, "one"): 5, (2, "one"): 1, (0, "two"): 3, (1, "two"): 2, (2, "two"): 3}
    found = choose(NAMES, 3, lambda choices: sum(cost.get(pair, 9) for pair in enumerate(choices)))
    assert found[0].choices == ("one", "two", "one")


def test_a_plan_is_measured_with_the_bytes_and_the_divergence_of_its_layers(tiny, words, tmp_path):
    half = len(words.content) // 2
    other = Text("other half", words.content[half:])
    audit = MemoryAudit(
        tiny("hybrid"), words, [60], num_tokens=128, kinds=(PLAIN, "merged keys, 25% near"), calibration=other
    )
    plan = audit.plan(other, 60)
    assert plan.kl <= plan.window_kl
    assert plan.layers == [2, 4]
    assert audit.is_of(plan, other)
    assert not audit.is_of(plan, words)
    write_memory_plans(tmp_path / "plan.json", [plan])
    assert read_memory_plans(tmp_path / "plan.json") == [plan]
    audit.take(plan)
    rows = [row for row in audit.rows() if isinstance(row, PassageRow)]
    planned = next(row for row in rows if row.contender == PLANNED)
    assert planned.budget == 60
    assert planned.num_bytes <= 2 * 2 * 60 * 64
    alike = [row for row in rows if row.contender in set(plan.choices)]
    if len(set(plan.choices)) == 1 and alike:
        assert planned.kl == alike[0].kl
    assert audit.header.calibration == "other half"


def test_the_plain_window_stays_where_another_is_hardly_better():
    assert choose(NAMES, 1, {(PLAIN,): 0.2, ("one",): 0.194, ("two",): 0.5}.__getitem__)[0].choices == (PLAIN,)
    assert choose(NAMES, 1, {(PLAIN,): 0.2, ("one",): 0.18, ("two",): 0.5}.__getitem__)[0].choices == ("one",)
