"""The report says what the rows say, in words, tables and a page that loads nothing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from linattn.lab.records import Header, HeadRow, ModelRow, write_records
from linattn.lab.report import advise, overview, summarise, write_page
from linattn.lab.report._figures import beyond
from linattn.lab.report._tables import end_to_end, heads
from pages import Page

HEADER = Header(
    {"torch": "2.13"}, "tiny", "TinyModel", False, 2, 2, 4, "words", "ab" * 32, 48, 0, 48, ["A", "B"], [8, 16], 2, 0
)


def head(layer, number, label, features, draw, error, uniform=0.8, kl=0.5, predicted=1.5):
    return HeadRow(
        layer,
        number,
        label,
        features,
        draw,
        draw,
        error,
        uniform,
        error / 2,
        0.4,
        kl,
        0.9,
        1.0,
        1.0,
        4.0,
        1.0,
        predicted,
    )


def rows_of(label, features, errors, cosines, **options):
    """Rows of one map: errors[draw] on every head, but the last head has twice the error."""
    for draw, (error, cosine) in enumerate(zip(errors, cosines, strict=True)):
        for layer in range(2):
            for number in range(2):
                doubled = 2 * error if (layer, number) == (1, 1) else error
                yield head(layer, number, label, features, draw, doubled, **options)
        yield ModelRow(label, features, draw, cosine, cosine / 2)


BASELINES = [ModelRow("exact", None, 0, 1.0, 1.0), ModelRow("uniform", None, 0, 0.5, 0.4)]


@pytest.fixture
def summary(tmp_path):
    """Two maps: A with two draws at two widths, good at 16; B signed, of its own width 40, with one huge error."""
    rows = [
        *BASELINES,
        *rows_of("A", 8, [0.7, 0.9], [0.5, 0.7]),
        *rows_of("A", 16, [0.4, 0.44], [0.8, 0.9]),
        *rows_of("B", 40, [20.0], [0.1], kl=None, predicted=None),
    ]
    path = tmp_path / "audit.jsonl"
    write_records(path, HEADER, rows)
    return summarise(path)


def test_means_spreads_and_shares(summary):
    narrow, wide, fixed = summary.lines
    assert (narrow.map, narrow.features, narrow.draws) == ("A", 8, 2)
    assert narrow.error.mean == pytest.approx(1.25 * 0.8)  # heads 1, 1, 1, 2
    assert narrow.error.spread == pytest.approx(1.25 * 0.2 / 2**0.5)
    assert narrow.median_error == pytest.approx(0.8)
    assert narrow.better_heads == pytest.approx(0.375)  # three of four in the first draw, none in the second
    assert wide.better_heads == 0.75 + 0.0
    assert wide.ratio == pytest.approx(1.25 * 0.42 / 0.8)
    assert wide.embedding_cosine.mean == pytest.approx(0.85)
    assert wide.kl == 0.5
    assert wide.predicted_ratio == 1.5
    assert (fixed.kl, fixed.predicted_ratio, fixed.error.spread) == (None, None, None)
    exact, uniform = summary.baselines
    assert (exact.error, exact.total_variation, exact.kl) == (0.0, 0.0, 0.0)
    assert (uniform.error, uniform.total_variation, uniform.kl) == pytest.approx((0.8, 0.4, 0.9))
    assert summary.head_ratios["A", 8] == [[pytest.approx(1.0)] * 2, [pytest.approx(1.0), pytest.approx(2.0)]]


def test_verdicts(summary):
    assert [line.verdict for line in summary.lines] == ["no better", "better", "no better"]
    line = replace(summary.lines[1], uniform_error=summary.lines[1].error.mean / 0.97)
    assert replace(line, error=replace(line.error, spread=None)).verdict == "hardly better"
    assert replace(line, error=replace(line.error, spread=1.0)).verdict == "no better"
    assert replace(line, error=replace(line.error, mean=math.nan)).verdict == "no better"


def test_words(summary):
    narrow, wide, widest = advise(summary).budgets
    assert narrow.heading == "Up to 8 features per head"
    assert narrow.text.startswith("No single map is better than averaging. The least error has A (8 features)")
    assert "Keep exact attention" in narrow.text
    assert wide.text.startswith("Take A (16 features): relative output error 0.53, averaging the values 0.80;")
    assert "embedding 0.850, averaging 0.500" in wide.text
    assert widest.heading == "Up to 40 features per head"
    # A on three heads (0.42), averaging on the fourth (0.80).
    assert "head by head, on this text: error 0.51 (A on 3, averaging on 1 of 4 heads)" in widest.text
    (doubt,) = advise(summary).doubts
    assert doubt.heading == "No better than averaging the values"
    assert doubt.text.startswith("A at 8 (38%); B at 40 (0%) features")


def test_words_when_another_map_serves_the_whole_model(summary):
    fixed = summary.lines[2]
    other = replace(fixed, embedding_cosine=replace(fixed.embedding_cosine, mean=0.95))
    lines = (*summary.lines[:2], other)
    text = advise(replace(summary, lines=lines)).budgets[2].text
    assert "The whole model keeps a higher cosine, 0.950, with B (40 features; error 25.00)." in text
    broken = replace(fixed, embedding_cosine=replace(fixed.embedding_cosine, mean=math.nan))
    text = advise(replace(summary, lines=(broken, *summary.lines[:2]))).budgets[2].text
    assert "higher cosine" not in text


def test_words_where_no_map_is_narrow_enough(summary):
    header = replace(summary.header, features=[4, 16])
    assert advise(replace(summary, header=header)).budgets[0].text == "None of the maps is that narrow."


def test_tables(summary):
    table = overview(summary)
    assert table.rows[0][:5] == ("exact", "", "0.00", "0.80", "0.00")
    assert table.rows[1][:5] == ("uniform averaging", "", "0.80", "0.80", "1.00")
    assert table.rows[2] == ("A", "8", "1.00 ± 0.18", "0.80", "1.25", "38%", "0.50", "0.600 ± 0.141")
    assert overview(summary, spreads=False).rows[2][2] == "1.00"
    assert end_to_end(summary).rows[0] == ("exact", "", "", "1.000", "1.000")
    assert end_to_end(summary).rows[4] == ("B", "40", "1", "0.100", "0.050")
    assert heads(summary).rows[4][-2:] == ("–", "no better")
    for content in (table, end_to_end(summary), heads(summary)):
        assert {len(row) for row in content.rows} == {len(content.columns)}


def test_errors_beyond_the_chart_are_named(summary):
    assert beyond(summary) == ("B at 40 features (25.00)",)


def test_a_file_with_rows_missing(tmp_path):
    path = tmp_path / "audit.jsonl"
    for rows in ([], BASELINES, [*BASELINES, *rows_of("A", 8, [0.7], [0.5])][:-1], [*rows_of("A", 8, [0.7], [0.5])]):
        write_records(path, HEADER, rows)
        with pytest.raises(ValueError, match="is no whole audit"):
            summarise(path)


@pytest.fixture
def page(summary, tmp_path):
    path = tmp_path / "index.html"
    hostile = replace(summary, header=replace(summary.header, model="</script><script>alert(1)</script>"))
    write_page(hostile, path)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_loads_nothing(page):
    page.check_that_nothing_is_loaded()


def test_the_page_escapes_what_it_was_given(page):
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert "alert(1)" in "".join(page.words)


def test_the_page_holds_the_heat_map_and_the_curves(page):
    script = page.scripts[-1]
    cells = json.loads(re.search(r"const cells = (.*);", script).group(1))
    assert set(cells) == {"A · 8", "A · 16", "B · 40"}
    assert cells["A · 8"] == [[1.0, 1.0], [1.0, 2.0]]
    figures = re.search(r"const figures = \{ \"head-map\": (\{.*\}), \"error-curves\": (\{.*\}) \};", script)
    heat, curves = (json.loads(figures.group(number)) for number in (1, 2))
    assert heat["data"][0]["type"] == "heatmap"
    assert heat["data"][0]["z"] == cells["A · 16"]
    assert [trace["name"] for trace in curves["data"]] == ["A", "B"]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"head-map", "error-curves"} <= ids
    options = [attributes for tag, attributes in page.tags if tag == "option"]
    assert [("selected" in attributes) for attributes in options] == [False, True, False]


def test_the_page_has_the_words_and_the_end_to_end_table(page):
    words = " ".join("".join(page.words).split())
    assert "Take A (16 features)" in words
    assert "No better than averaging the values" in words
    assert "uniform averaging" in words
    assert "Above the upper edge: B at 40 features (25.00)." in words
