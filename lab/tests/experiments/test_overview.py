"""Claims of the overview: what the figures say, and that other figures would say otherwise."""

from __future__ import annotations

import pytest

from linattn_lab.experiments.experiment import UNIFORM


def _as_expected(row):
    """The value claimed, where one is."""
    return row.expected


# Experiment, its verdict, the verdict of doctored rows, how each value is doctored.
CASES = [
    ("elementwise-exp-is-softmax", "fails", "holds", _as_expected),
    (
        "only-exp-survives-reordering",
        "fails",
        "holds",
        lambda row: (0.0 if row.x == 0 else 0.1) if row.series != UNIFORM else None,
    ),
    ("polynomial-product", "fails", "holds", _as_expected),
    ("kl-of-the-polynomial-map", "fails", "holds", _as_expected),
    ("state-is-d-by-d", "holds", "fails", lambda row: row.value * row.x if row.series.startswith("S, exp") else None),
    ("elementwise-maps-keep-attention", "fails", "holds", lambda row: None if row.series == UNIFORM else 0.2),
    ("total-cost", "fails", "holds", _as_expected),
    ("concatenated-positions", "fails", "holds", lambda row: 0.1),
    ("relative-bias-by-reordering", "fails", "holds", lambda row: min(row.value, 32)),
]

# Experiment with a verdict of several parts, and which rows are one part: left as measured, it alone decides.
PARTS = [
    ("elementwise-exp-is-softmax", lambda row: row.x == 0),
    ("elementwise-exp-is-softmax", lambda row: row.x == 1),
    ("elementwise-exp-is-softmax", lambda row: row.x == 2),
    ("only-exp-survives-reordering", lambda row: row.series == "from softmax attention"),
    ("only-exp-survives-reordering", lambda row: row.series == "from the same weights in the other order"),
    ("kl-of-the-polynomial-map", lambda row: row.series.startswith("degree")),
    ("kl-of-the-polynomial-map", lambda row: row.series.startswith("keys")),
    ("kl-of-the-polynomial-map", lambda row: row.series.startswith("trace")),
    ("kl-of-the-polynomial-map", lambda row: row.series.startswith("twice")),
    ("elementwise-maps-keep-attention", lambda row: row.x == 0),
    ("elementwise-maps-keep-attention", lambda row: row.x == 1),
    ("elementwise-maps-keep-attention", lambda row: row.x == 2),
    ("elementwise-maps-keep-attention", lambda row: row.series.startswith("elu")),
]

# Experiment, series, abscissa, and the figure published for it: with its last digit, or that many standard errors.
PRINTED = [
    ("elementwise-exp-is-softmax", "exact", 0, 0.119, 0.0005),
    ("elementwise-exp-is-softmax", "elementwise exponential", 0, 0.881, 0.0005),
    ("elementwise-exp-is-softmax", "elementwise exponential", 2, 0.494, 0.0005),
    ("elementwise-exp-is-softmax", UNIFORM, 2, 0.496, 0.0005),
]


@pytest.mark.parametrize(("name", "status", "other", "new_value"), CASES, ids=[case[0] for case in CASES])
def test_the_figures_decide(taken, decided, doctored, name, status, other, new_value) -> None:
    rows = taken(name)
    assert decided(name, rows) == status
    assert decided(name, doctored(rows, new_value)) == other


@pytest.mark.parametrize(("name", "part"), PARTS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(PARTS)])
def test_each_part_refutes_alone(taken, decided, doctored, name, part) -> None:
    healed = {name: new_value for name, _, _, new_value in CASES}[name]
    rows = taken(name)
    assert decided(name, doctored(rows, lambda row: None if part(row) else healed(row))) == "fails"


def test_a_state_whose_normaliser_grows_is_no_constant_state(taken, decided, doctored) -> None:
    rows = taken("state-is-d-by-d")
    assert (
        decided("state-is-d-by-d", doctored(rows, lambda row: row.x if row.series.startswith("z") else None)) == "fails"
    )


def test_a_map_near_the_threshold_is_undecided(taken, decided, doctored) -> None:
    uniform = {row.x: row.value for row in taken("elementwise-maps-keep-attention") if row.series == UNIFORM}
    rows = doctored(
        taken("elementwise-maps-keep-attention"),
        lambda row: uniform[row.x] / 2 if row.x == 0 and row.series != UNIFORM else 0.2,
    )
    rows = doctored(rows, lambda row: uniform[row.x] if row.series == UNIFORM else None)
    assert decided("elementwise-maps-keep-attention", rows) == "undecided"


@pytest.mark.parametrize(("name", "series", "x", "printed", "digit"), PRINTED)
def test_printed_figures_are_reproduced(taken, name, series, x, printed, digit) -> None:
    row = next(row for row in taken(name) if row.series == series and row.x == x)
    assert abs(row.value - printed) <= digit + 4 * (row.standard_error or 0)


def test_divergences_of_the_polynomial_map_are_those_printed(taken) -> None:
    # KL 0.502, 0.455 at k = 0, 2 and ratios per doubling of the scale; other tokens move them by a few per cent.
    rows = {(row.series, row.x): row.value for row in taken("kl-of-the-polynomial-map")}
    assert rows["degree k over degree 2", 0] == pytest.approx(0.502 / 0.455, rel=0.05)
    for scale, ratio in ((0.025, 4.43), (0.05, 5.61), (0.1, 8.65)):
        assert rows["twice the scale x over the scale x", scale] == pytest.approx(ratio, rel=0.05)
