"""A benchmark's words, table and page say what its rows say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from linattn_lab.bench.records import BENCH, BenchHeader, LengthRow
from linattn_lab.crossover import Crossover, find_crossover
from linattn_lab.report import Report, write_page
from linattn_lab.report.bench.summary import conclude, length_table, slope, summarise_bench
from pages import Page

LENGTHS = [256, 1024, 2048, 8192]
HEADER = BenchHeader(
    versions={"python": "3", "torch": "2"},
    processor="a processor",
    device="cpu",
    device_name="a processor",
    threads=2,
    map="FavorPlus",
    map_repr="FavorPlus(64, 256)",
    num_features=256,
    state_numbers=16_640,
    batch=2,
    num_heads=8,
    head_dim=64,
    dtype="float32",
    is_causal=False,
    backward=False,
    lengths=LENGTHS,
    repeats=3,
    seed=0,
    num_verified=512,
    error_bound=1e-4,
    exact_limit=60.0,
    memory="peak of a call",
)


def linear(length):
    """A power law that meets `exact` at L = 1,500."""
    return 1e-5 * length


def exact(length):
    """The other."""
    return 1e-5 * length**2 / 1500


def row(length, **changes):
    """One length of the two power laws, medians between two other samples."""
    found = LengthRow(
        length=length,
        error=1e-6,
        gradient_error=None,
        approximation_error=0.5,
        uniform_error=0.8,
        linear_seconds=[2 * linear(length), 0.9 * linear(length), linear(length)],
        exact_seconds=[2 * exact(length), 0.9 * exact(length), exact(length)],
        exact_predicted=None,
        linear_memory=1000 * length,
        exact_memory=2000 * length,
    )
    return replace(found, **changes)


@pytest.fixture
def summary_of(tmp_path):
    """A function that writes rows and sums them up."""

    def of(rows, header=HEADER):
        path = tmp_path / "bench.jsonl"
        BENCH.write(path, header, rows)
        return summarise_bench(path)

    return of


@pytest.fixture
def summary(summary_of):
    """All four lengths."""
    return summary_of([row(length) for length in LENGTHS])


def words(summary, heading):
    """The remark under a heading."""
    return {point.heading: point.text for point in conclude(summary)}.get(heading)


def test_power_laws_give_their_crossing_and_their_slopes(summary):
    assert summary.crossover.length == pytest.approx(1500, rel=1e-12)
    assert summary.crossover.between == (1024, 2048)
    assert summary.linear_slope == pytest.approx(1.0, abs=1e-12)
    assert summary.exact_slope == pytest.approx(2.0, abs=1e-12)
    assert words(summary, "Crossover") == "Linear attention is slower at 1,024 tokens and faster from 2,048 on."
    assert words(summary, "Growth") == "Time grows as L^1.00 (linear) and L^2.00 (exact), by least squares."


def test_what_is_kept_stands_beside_the_cache(summary):
    assert words(summary, "Kept") == (
        "Of a text of any length a head keeps 16,640 numbers, as many as the keys and values of 130 tokens; exact "
        "attention keeps all of them, at L = 8,192 1,048,576."
    )


def test_faster_everywhere(summary_of):
    header = replace(HEADER, lengths=[2048, 8192])
    summary = summary_of([row(2048), row(8192)], header)
    assert summary.crossover == Crossover(None, None, always=True, last=8192)
    assert "faster at every length measured (with exact attention up to 8,192)" in words(summary, "Crossover")


def test_not_reached(summary_of):
    header = replace(HEADER, lengths=[256, 1024])
    summary = summary_of([row(256), row(1024)], header)
    assert summary.crossover == Crossover(None, None, always=False, last=1024)
    assert words(summary, "Crossover").startswith("Linear attention is not faster up to 1,024 tokens.")


def test_only_the_last_crossing_counts():
    points = [(1, 1.0, 2.0), (2, 4.0, 2.0), (4, 4.0, 8.0), (8, 1.0, 9.0)]
    found = find_crossover(points)
    assert found.between == (2, 4)
    assert found.length == pytest.approx(math.sqrt(8))
    assert find_crossover([*points, (16, 2.0, 1.0)]) == Crossover(None, None, always=False, last=16)


def test_as_fast_is_where_faster_begins():
    assert find_crossover([(2, 1.0, 1.0), (4, 1.0, 2.0)]).length == 2.0
    assert not find_crossover([(2, 1.0, 1.0)]).always


def test_one_length_has_no_slope(summary_of):
    assert slope([(8, 1.0)]) is None
    assert words(summary_of([row(256)], replace(HEADER, lengths=[256])), "Growth") is None


def test_exact_attention_left_out(summary_of):
    stopped = {"exact_seconds": None, "exact_memory": None}
    rows = [
        row(256),
        row(1024),
        row(2048, **stopped, exact_predicted=75.4),
        row(8192, **stopped, exact_predicted=900.0),
    ]
    summary = summary_of(rows)
    assert words(summary, "Crossover").startswith("Linear attention is not faster up to 1,024 tokens.")
    assert words(summary, "Left out") == (
        "Exact attention was not run from L = 2,048 on: one call would take about 75 s there, and the limit is 60 s."
    )
    assert summary.exact_slope == pytest.approx(2.0, abs=1e-12)
    cells = dict(zip(length_table(summary).columns, length_table(summary).rows[2], strict=True))
    assert (cells["exact ms"], cells["speed / exact"], cells["exact MB"]) == ("—", "—", "—")
    assert cells["linear MB"] == "2.05"


def test_table(summary):
    table = length_table(summary)
    assert table.rows[0] == (
        "256",
        "2.56 (2.30–5.12)",
        "0.44 (0.39–0.87)",
        "0.17",
        "0.26",
        "0.51",
        "200,000",
        "0.50",
        "0.80",
    )
    assert table.baselines == 0
    assert length_table(summary, spreads=False).rows[3][1:4] == ("81.9", "447", "5.46")
    assert {len(cells) for cells in table.rows} == {len(table.columns)}


def test_words_on_correctness_and_on_how_wrong(summary, summary_of):
    assert words(summary, "Left out") is None
    assert words(summary, "Memory") is None
    assert "within 1.0e-06 of the definition in float64 (relative error; the bound is 1.0e-04)" in words(
        summary, "Verified"
    )
    assert "FavorPlus (256 features) is up to 0.50 away from exact attention" in words(summary, "Error")
    assert "over 512 tokens), uniform attention 0.80. linattn audit" in words(summary, "Error")
    header = replace(HEADER, error_bound=None, backward=True, memory="not measured on this system")
    changes = {"gradient_error": math.inf, "approximation_error": 0.9, "linear_memory": None, "exact_memory": None}
    signed = summary_of([row(length, **changes) for length in LENGTHS], header)
    assert "Output and gradients of FavorPlus came within inf" in words(signed, "Verified")
    assert "there is no bound for weights of both signs" in words(signed, "Verified")
    assert "it is no better" in words(signed, "Error")
    assert words(signed, "Memory") == "It was not measured on this system."


def test_a_file_with_rows_missing(summary_of):
    for rows in ([], [row(256)], [row(length) for length in reversed(LENGTHS)]):
        with pytest.raises(ValueError, match="is no whole benchmark"):
            summary_of(rows)


@pytest.fixture
def page_of(tmp_path):
    """A function that writes a summary's page and reads it."""

    def of(summary):
        path = tmp_path / "index.html"
        write_page(Report(bench=summary), path)
        return Page(path.read_text(encoding="utf-8"))

    return of


def test_the_page_loads_nothing_and_escapes_what_it_was_given(summary, page_of):
    hostile = replace(summary, header=replace(summary.header, map_repr="</script><script>alert(1)</script>"))
    page = page_of(hostile)
    page.check_that_nothing_is_loaded()
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert "alert(1)" in page.text


def test_the_page_holds_both_charts(summary, page_of):
    page = page_of(summary)
    assert {"time-curves", "memory-curves"} <= {attributes.get("id") for _, attributes in page.tags}
    times, sizes = page.figure("time-curves"), page.figure("memory-curves")
    names = ["linear attention", "exact attention"]
    assert [curve["name"] for curve in times["curves"]] == [*names, "crossover, between 1,024 and 2,048"]
    assert [curve["name"] for curve in sizes["curves"]] == names
    for chart in (times, sizes):
        assert chart["x"]["is_logarithmic"]
        assert chart["y"]["is_logarithmic"]
        assert [curve["x"] for curve in chart["curves"][:2]] == [LENGTHS, LENGTHS]
        assert all(len(curve["tips"]) == len(curve["x"]) for curve in chart["curves"])
    ours, theirs = times["curves"][:2]
    assert ours["y"] == pytest.approx([1e3 * linear(length) for length in LENGTHS])
    assert ours["tips"][0] == f"linear attention, {LENGTHS[0]:,} tokens: {1e3 * linear(LENGTHS[0]):,.4g} ms"
    longest = [high - middle for high, middle in zip(theirs["high"], theirs["y"], strict=True)]
    assert longest == pytest.approx([1e3 * exact(length) for length in LENGTHS])
    assert sizes["curves"][1]["y"] == pytest.approx([length / 500 for length in LENGTHS])
    assert "Linear attention is slower at 1,024 tokens and faster from 2,048 on" in page.text
    assert "uniform error" in page.text


def test_the_page_without_memory(summary, page_of):
    rows = tuple(replace(each, linear_memory=None, exact_memory=None) for each in summary.rows)
    header = replace(summary.header, memory="not measured on this system")
    page = page_of(replace(summary, rows=rows, header=header))
    assert "memory-curves" not in {attributes.get("id") for _, attributes in page.tags}
    assert page.text.count("It was not measured on this system.") == 2
    page.figure("time-curves")
