"""Claims about what the texts leave out: what the figures say, and that other figures would say otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

# A process takes each experiment's figures once.
pytestmark = pytest.mark.xdist_group("figures of beyond")


def _as_expected(row):
    """The value claimed, where one is."""
    return row.expected


# Experiment, its verdict, the verdict of doctored rows, how each value is doctored.
CASES = [
    ("raw-qr-is-haar", "fails", "holds", _as_expected),
    ("global-key-maximum-is-causal", "fails", "holds", lambda row: 1e-15),
]

# Experiments that fail, and how each value is doctored for them to hold: only without the noise of what was measured.
NOISY = [
    ("epsilon-is-negligible", lambda row: 0.0),
]

# Experiment, the status its verdict turns to, and one part of its rows doctored, the others as measured or healed.
PARTS = [
    (
        "raw-qr-is-haar",
        "fails",
        lambda row: None if row.x < 2 else row.expected,
    ),
    (
        "raw-qr-is-haar",
        "fails",
        lambda row: None if row.x >= 4 else row.expected,
    ),
    (
        "global-key-maximum-is-causal",
        "fails",
        lambda row: None if row.x == 2 else 1e-15,
    ),
    (
        "epsilon-is-negligible",
        "fails",
        lambda row: 0.0 if row.x < 1e-5 else None,
    ),
]

# Experiment, series, abscissa, the figure published for it, and how far its last digit or its own sampling may be off.
PRINTED = [
    ("raw-qr-is-haar", "Q as returned", 0, 0.79, 0.01),
    ("raw-qr-is-haar", "Q as returned", 1, 1.20, 0.01),
    ("raw-qr-is-haar", "Q as returned", 4, -0.04, 0.005),
    ("raw-qr-is-haar", "Q as returned", 5, -0.01, 0.005),
    ("epsilon-is-negligible", "share of key features below epsilon", 1e-6, 0.87, 0.005),
    ("epsilon-is-negligible", "share of key features below epsilon", 1e-4, 0.997, 0.0005),
    ("epsilon-is-negligible", "distance from averaging the values", 1e-4, 0.126, 0.0005),
    ("epsilon-is-negligible", "distance from FAVOR+ without epsilon", 1e-4, 0.96, 0.005),
]


@pytest.mark.parametrize(("name", "status", "other", "new_value"), CASES, ids=[case[0] for case in CASES])
def test_the_figures_decide(taken, decided, doctored, name, status, other, new_value) -> None:
    rows = taken(name)
    assert decided(name, rows) == status
    assert decided(name, doctored(rows, new_value)) == other


@pytest.mark.parametrize(("name", "status", "new_value"), PARTS, ids=[f"{part[0]}-{n}" for n, part in enumerate(PARTS)])
def test_each_part_decides_alone(taken, decided, doctored, name, status, new_value) -> None:
    assert decided(name, doctored(taken(name), new_value)) == status


def _without_noise(rows):
    """The rows as if nothing had been sampled: doctored values do not inherit the noise of those they replace."""
    return tuple(replace(row, standard_error=None) for row in rows)


@pytest.mark.parametrize(("name", "new_value"), NOISY, ids=[case[0] for case in NOISY])
def test_noisy_figures_decide(taken, decided, doctored, name, new_value) -> None:
    assert decided(name, taken(name)) == "fails"
    assert decided(name, _without_noise(doctored(taken(name), new_value))) == "holds"


def test_a_later_key_changes_earlier_outputs_by_more_than_their_deviation(taken) -> None:
    rows = {(row.series, row.x): row.value for row in taken("global-key-maximum-is-causal")}
    assert rows["maximum over all keys, epsilon 1e-6", 3.0] > 1
    assert rows["linear_attention: running maxima", 3.0] < 1e-12


@pytest.mark.parametrize(("name", "series", "x", "printed", "digit"), PRINTED)
def test_printed_figures_are_reproduced(taken, name, series, x, printed, digit) -> None:
    row = next(row for row in taken(name) if row.series == series and row.x == x)
    assert abs(row.value - printed) <= digit + 4 * (row.standard_error or 0)
