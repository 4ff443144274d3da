"""Five hundred random cases against a dense oracle, the same ones each time; `tests/fuzz.py` runs more by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest

from fuzzing import running

CASES = 500
# Cases of one test: few enough that parallel workers share them evenly.
_CHUNK = {"compiled": 2, "threads": 8, "gradients": 20}


def chunks() -> dict[str, list[int]]:
    """The cases by kind, in pieces."""
    kinds = defaultdict(list)
    for number in range(CASES):
        kinds[running.kind_of(number)].append(number)
    found = {}
    for kind in running.KINDS:
        size = _CHUNK.get(kind, 60)
        for start in range(0, len(kinds[kind]), size):
            found[f"{kind}-{start // size}"] = kinds[kind][start : start + size]
    return found


@pytest.mark.parametrize("numbers", [pytest.param(numbers, id=name) for name, numbers in chunks().items()])
def test_random_cases_are_the_oracle_s(numbers: list[int]) -> None:
    failed = [end for end in map(running.run, numbers) if end.symptom]
    words = "\n".join(f"case {end.number}: {end.symptom}\n{end.calls}" for end in failed)
    assert not failed, f"{len(failed)} of {len(numbers)}; python tests/fuzz.py --case N repeats one\n{words}"
