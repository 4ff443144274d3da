"""A report of a constant memory: what is lost comes first, and every figure is the file's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from linattn_lab.constant_memory.records import MEMORY, MemoryHeader, PassageRow, RecallRow
from linattn_lab.report import conclusions, lost, summarise_memory, table_at, write_report
from linattn_lab.report.memory.figures import kl_by_bytes, kl_by_position
from linattn_lab.report.memory.words import verdict
from pages import Page

HEADER = MemoryHeader(
    versions={"python": "3"},
    model="small",
    architecture="SmallForCausalLM",
    layers=[1, 3],
    num_windowed=2,
    num_heads=2,
    num_key_heads=1,
    head_dim=4,
    value_dim=4,
    number_bytes=4,
    text="letters",
    text_sha256="0" * 64,
    num_tokens=600,
    num_measured=300,
    passages=[0, 700],
    ends=[256, 512, 600],
    recall_tokens=300,
    tasks=["needles"],
    budgets=[64],
    kinds=["sinks + window", "merged keys, 25% near", "far part off", "H2O"],
)


def passage(number, contender, kl, *, budget=64, error=0.1):
    return PassageRow(
        passage=number,
        contender=contender,
        label=f"{contender} of {budget}",
        budget=budget,
        num_bytes=1000 + budget,
        kl=kl,
        perplexity=8.0 * (1 + kl),
        same=1 - kl,
        kl_by_position=[kl / 2, math.nan, kl],
        perplexity_by_position=[8.0, math.nan, 9.0],
        errors=[[error, error], [3 * error, 3 * error]],
    )


def recall(contender, hits, budget=64):
    return RecallRow("needles", contender, contender, budget, [0.1, 0.9], hits)


ROWS = [
    passage(0, "exact", 0.0, budget=0, error=0.0),
    passage(0, "uniform", 0.8, budget=0, error=0.9),
    passage(0, "sinks + window", 0.2),
    passage(1, "sinks + window", 0.4),
    passage(0, "merged keys, 25% near", 0.1),
    passage(0, "far part off", 0.5),
    recall("exact", [1.0, 0.8], 0),
    recall("uniform", [0.0, 0.0], 0),
    recall("sinks + window", [0.0, 0.5]),
    recall("merged keys, 25% near", [0.25, 0.75]),
]


@pytest.fixture
def summary(tmp_path):
    MEMORY.write(tmp_path / "memory.jsonl", HEADER, ROWS)
    return summarise_memory(tmp_path / "memory.jsonl")


def test_means_over_passages(summary):
    line = summary.line("sinks + window", 64)
    assert (line.passages, line.kl) == (2, pytest.approx(0.3))
    assert line.perplexity == pytest.approx(8 * math.sqrt(1.2 * 1.4))
    assert line.error == pytest.approx(0.2)
    assert line.recall == {"needles": 0.25}
    assert line.kl_by_position[0] == pytest.approx(0.15)
    assert math.isnan(line.kl_by_position[1])


def test_what_is_lost_is_said_with_the_plain_window_and_the_exact_model(summary):
    text = lost(summary).text
    assert "needles: exact 90%" in text
    assert "best of all 50% (merged keys, 25% near)" in text
    assert "sinks + window 25%" in text


def test_merged_keys_in_few_bits_are_judged_too(tmp_path):
    MEMORY.write(tmp_path / "memory.jsonl", HEADER, [*ROWS, passage(0, "merged keys in 4 bits", 0.05)])
    (point,) = conclusions(summarise_memory(tmp_path / "memory.jsonl"))
    assert "Merged keys (merged keys in 4 bits of 64) are worth their bytes: KL 0.050" in point.text


def test_both_controls_decide_about_merged_keys(summary):
    (point,) = conclusions(summary)
    assert "Least KL 0.100: merged keys, 25% near" in point.text
    assert (
        "are worth their bytes: KL 0.100, with these bytes in exact keys 0.300, with the far part off 0.500"
        in point.text
    )


@pytest.mark.parametrize(
    ("merged", "plain", "off", "said"),
    [
        (0.1, 0.2, 0.5, "worth their bytes"),
        (0.3, 0.2, 0.5, "not worth their bytes"),
        (0.3, 0.4, 0.2, "not worth their bytes"),
    ],
)
def test_verdict(merged, plain, off, said):
    assert verdict(merged, plain, off) == said


def test_table_has_baselines_first_and_the_least_divergence_next(summary):
    table = table_at(summary, 64)
    assert [row[0] for row in table.rows] == [
        "exact",
        "uniform",
        "merged keys, 25% near",
        "sinks + window",
        "far part off",
    ]
    assert table.baselines == 2
    assert table.columns[-1] == "needles"
    assert [row[-1] for row in table.rows] == ["90%", "0%", "50%", "25%", "–"]


def test_charts(summary):
    by_bytes, by_position = kl_by_bytes(summary), kl_by_position(summary, 64)
    assert [curve.name for curve in by_bytes.curves][:2] == ["sinks + window", "merged keys, 25% near"]
    assert by_bytes.curves[1].x == (1064,)
    assert by_bytes.curves[1].y == (0.1,)
    # The stretch in which nothing is measured is left out.
    points = zip(by_position.curves[1].x, by_position.curves[1].y, strict=True)
    assert [point for point in points if point[1] is not None] == [(256, 0.05), (600, 0.1)]


def test_an_unfinished_file_says_so(tmp_path, summary):
    assert summary.unfinished
    one = replace(HEADER, passages=[0], tasks=[], kinds=["sinks + window"])
    MEMORY.write(tmp_path / "memory.jsonl", one, ROWS[:3])
    assert not summarise_memory(tmp_path / "memory.jsonl").unfinished
    MEMORY.write(tmp_path / "memory.jsonl", one, [])
    with pytest.raises(ValueError, match="no figures yet"):
        summarise_memory(tmp_path / "memory.jsonl")


def test_page_has_recall_on_its_first_screen(tmp_path, summary):
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    assert text.index("What does a constant memory lose?") < text.index("Should I linearize this model?")
    assert "merged keys, 25% near" in text
