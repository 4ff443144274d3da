"""Claims of the derivation: what the figures say, and that other figures would say otherwise."""

from __future__ import annotations

import pytest

# Experiment, its verdict, the verdict of doctored rows, how each value is doctored.
CASES = [
    ("output-converges", "holds", "fails", lambda row: 1.0),
]


@pytest.mark.parametrize(("name", "status", "other", "new_value"), CASES, ids=[case[0] for case in CASES])
def test_the_figures_decide(taken, decided, doctored, name, status, other, new_value) -> None:
    rows = taken(name)
    assert decided(name, rows) == status
    assert decided(name, doctored(rows, new_value)) == other
