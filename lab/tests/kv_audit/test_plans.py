"""Plans of layers: the least measured KL, and never worse than a plain window."""

from __future__ import annotations

import json
import math

import pytest
import torch

from linattn.kv_cache.layer_plans import PLAIN, read_memory_plans
from linattn_lab.kv_audit.planning import CANDIDATES
from linattn_lab.kv_audit.plans import MARGIN, Choice, choose, shares

NAMES = (PLAIN, "one", "two")
BUDGET = 64


def alike(name, num_layers=3):
    """The same in all layers."""
    return (Choice(name, BUDGET),) * num_layers


def measured(cost):
    """A KL that is a sum over layers, each by its candidate's cost at the budget, and falls as its own bytes grow."""

    def measure(choices):
        return sum(cost[place, one.name] * BUDGET / one.num_keys for place, one in enumerate(choices) if one)

    return measure


@pytest.mark.parametrize("seed", range(20))
def test_never_worse_than_a_plain_window_and_the_least_of_what_was_tried(seed):
    draw = torch.Generator().manual_seed(seed)
    kl = {}

    def measure(choices):
        return kl.setdefault(choices, float(torch.rand((), generator=draw)))

    found = choose(NAMES, 3, BUDGET, measure)
    assert all(trial.kl == kl[trial.choices] for trial in found)
    plain = kl[alike(PLAIN)]
    assert found[0].kl <= plain
    least = min(trial.kl for trial in found)
    assert found[0].kl == (least if least <= MARGIN * plain else plain)
    # One for other shares of the bytes, and one more for each layer, but what was measured already.
    assert len({trial.choices for trial in found}) == len(found) <= len(NAMES) + 1 + 3
    assert {alike(name) for name in NAMES} <= {trial.choices for trial in found}
    for trial in found:
        assert sum(one.num_keys for one in trial.choices) <= 3 * BUDGET
        names = {one.name for one in trial.choices}
        assert names == {PLAIN} or PLAIN not in names


def test_a_layer_of_its_own_is_found():
    # "one" is best in all layers but the second, where the runner-up is; it forgets as much in all of them.
    cost = {(0, "one"): 1, (1, "one"): 1, (2, "one"): 1, (0, "two"): 3, (1, "two"): 0.5, (2, "two"): 3}
    cost |= {(place, PLAIN): 9 for place in range(3)}
    found = choose(NAMES, 3, BUDGET, measured(cost))
    assert found[0].choices == (Choice("one", BUDGET), Choice("two", BUDGET), Choice("one", BUDGET))


def test_a_layer_that_forgets_more_has_more_of_the_bytes():
    """In proportion to the roots, which no other shares beat by the sum's own law; a quarter at least."""
    cost = {(place, name): x * 10**n for place, x in enumerate((16, 4, 0.0001)) for n, name in enumerate(NAMES[::-1])}
    found = choose(NAMES, 3, BUDGET, measured(cost))
    assert [one.num_keys for one in found[0].choices] == [117, 58, BUDGET // 4]
    ahead = found[0].kl
    assert ahead < min(trial.kl for trial in found if len({one.num_keys for one in trial.choices}) == 1)
    for moved in (-8, 8):
        keys = [117 + moved, 58 - moved, BUDGET // 4]
        other = tuple(Choice(one.name, n) for one, n in zip(found[0].choices, keys, strict=True))
        assert measured(cost)(other) > ahead


@pytest.mark.parametrize("seed", range(5))
def test_shares_use_no_more_than_all_bytes_and_nearly_all(seed):
    alone = (10 * torch.rand(7, generator=torch.Generator().manual_seed(seed)) ** 8).tolist()
    for budget in (1, 3, 100, 512):
        found = shares(budget, alone)
        assert min(found) >= max(budget // 4, 1)
        assert 7 * budget - 7 < sum(found) <= 7 * budget


def test_what_has_no_room_is_no_trial():
    def measure(choices):
        if any(one is not None and one.num_keys < BUDGET // 2 for one in choices):
            return math.inf
        return sum({PLAIN: 3.0, "one": 1.0, "two": math.inf}[one.name] for one in choices[:1] if one)

    found = choose(NAMES, 2, BUDGET, measure)
    assert found[0].choices == alike("one", 2)
    assert all(trial.kl < math.inf for trial in found)
    assert choose(NAMES, 2, BUDGET, lambda given: 3.0 if given == alike(PLAIN, 2) else math.inf)[0].kl == 3.0


def test_the_plain_window_stays_where_another_is_hardly_better():
    for one, kept in ((0.194, PLAIN), (0.18, "one")):
        kl = {PLAIN: 0.2, "one": one, "two": 0.5}
        assert choose(NAMES, 1, BUDGET, lambda choices, kl=kl: kl[choices[0].name])[0].choices == alike(kept, 1)


def stored(**changed):
    """The record of a plan of two layers."""
    names, budgets = [PLAIN, list(CANDIDATES)[-1]], [40, 80]
    record = {
        "model": "m",
        "budget": 60,
        "num_tokens": 99,
        "calibration": "t",
        "calibration_sha256": "0",
        "layers": [2, 4],
        "choices": names,
        "budgets": budgets,
        "labels": ["sinks 4 + window 36", "window 4 + merged 9 in 8 bits"],
        "kl": 0.1,
        "window_kl": 0.2,
        "trials": [{"choices": names, "budgets": budgets, "kl": 0.0}],
    }
    return record | changed


TRIAL = stored()["trials"][0]


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        (None, "holds no plans"),
        ([stored(), stored()], r"holds plans of \[60, 60\] keys, wanted one for each budget"),
        *(([{k: v for k, v in stored().items() if k != name}], f"plan 0: {name} is missing") for name in stored()),
        ([stored(more=1)], "plan 0: there is no 'more'"),
        *(
            ([stored(), stored(budget=61, **{name: value})], f"plan 1: {name} must be ")
            for name in ("kl", "window_kl")
            for value in (-1, -1e-9, math.nan, math.inf, "0", True, None, [0.1])
        ),
        *(([stored(budget=value)], "plan 0: budget must be ") for value in (0, -60, 60.0, "60", 2**63)),
        ([stored(num_tokens=0)], "num_tokens must be greater than or equal to 1, got 0"),
        ([stored(budgets=[40, -80])], r"budgets\[1\] must be greater than or equal to 1, got -80"),
        ([stored(budgets=[40, 81])], r"budgets must be at most 60 keys a layer in the mean, got \[40, 81\]"),
        ([stored(budgets=[40])], r"one for each layer of \[2, 4\]"),
        ([stored(choices=["full", PLAIN])], "choices must be among sinks"),
        ([stored(layers=[])], "one for each layer of"),
        ([stored(layers=[4, 2])], "layers must be different numbers in ascending order"),
        ([stored(layers=[-1, 2])], "layers must be different numbers in ascending order"),
        ([stored(labels=["window 4 + merged 9"])], "labels must be one for each layer"),
        ([stored(labels=["", "merged 128"])], "labels: a cache has a window before its merged keys, got 'merged 128'"),
        (
            [stored(labels=["", "windw 4 + merged 9"])],
            "labels: 'windw 4' is no part of merged keys, did you mean 'window'?",
        ),
        (
            [stored(trials=[TRIAL | {"kl": -0.1}])],
            r"plan 0: trials\[0\].kl must be greater than or equal to 0, got -0.1",
        ),
        ([stored(trials=[TRIAL | {"budgets": [1]}])], "one for each layer"),
    ],
)
def test_files_that_are_no_plan(tmp_path, plans, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"kind": "linattn memory plan", "version": 3, "plans": plans}))
    with pytest.raises(ValueError, match=words) as caught:
        read_memory_plans(path)
    assert str(path) in str(caught.value)
    assert "make the plan again, with `linattn audit --budget --plan-out`" in str(caught.value)


def test_a_plan_as_a_file_has_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"kind": "linattn memory plan", "version": 3, "plans": [stored()]}))
    assert read_memory_plans(path)[0].labels == stored()["labels"]
