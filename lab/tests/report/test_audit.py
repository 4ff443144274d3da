"""The report says what the rows say, in words, tables and a page that loads nothing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from linattn_lab.audit.records import AUDIT, Header, HeadRow, ModelRow, RankRow
from linattn_lab.report import Report, write_page, write_report
from linattn_lab.report.audit.advice import advise
from linattn_lab.report.audit.frontier import family, least
from linattn_lab.report.audit.summary import summarise_audit
from linattn_lab.report.audit.tables import end_to_end, heads, overview
from pages import Page

LABELS = ["FavorPlus", "Taylor"]
HEADER = Header(
    {"torch": "2.13"},
    "tiny",
    "TinyModel",
    False,
    2,
    2,
    4,
    4,
    "words",
    "ab" * 32,
    48,
    0,
    48,
    ["FavorPlus", "Taylor"],
    [8, 16],
    2,
    0,
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
        5 * features,
        36 * features,
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
        *rows_of("FavorPlus", 8, [0.7, 0.9], [0.5, 0.7]),
        *rows_of("FavorPlus", 16, [0.4, 0.44], [0.8, 0.9]),
        *rows_of("Taylor", 40, [20.0], [0.1], kl=None, predicted=None),
        *(RankRow(0, number, 2, 10, 0.1 + 0.2 * number) for number in range(2)),
        RankRow(0, 0, 1, 5, 0.5),
    ]
    path = tmp_path / "audit.jsonl"
    AUDIT.write(path, HEADER, rows)
    return summarise_audit(path)


def test_means_spreads_and_shares(summary):
    narrow, wide, fixed = summary.lines
    assert (narrow.map, narrow.features, narrow.draws) == ("FavorPlus", 8, 2)
    assert (narrow.state_numbers, narrow.flops_per_token) == (40, 288)
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
    assert narrow.head_ratios == ((pytest.approx(1.0),) * 2, (pytest.approx(1.0), pytest.approx(2.0)))


def test_verdicts(summary):
    assert [line.verdict for line in summary.lines] == ["no better", "better", "no better"]
    line = replace(summary.lines[1], uniform_error=summary.lines[1].error.mean / 0.97)
    assert replace(line, error=replace(line.error, spread=None)).verdict == "hardly better"
    assert replace(line, error=replace(line.error, spread=1.0)).verdict == "no better"
    assert replace(line, error=replace(line.error, mean=math.nan)).verdict == "no better"


def test_limits_are_means_over_heads_narrowest_first(summary):
    assert [(limit.rank, limit.state_numbers) for limit in summary.limits] == [(1, 5), (2, 10)]
    assert [limit.error for limit in summary.limits] == pytest.approx([0.5, 0.2])


def test_words(summary):
    narrow, wide = advise(summary).budgets
    assert narrow.heading == "Up to 48 numbers per head, what 8 random features keep"
    assert narrow.text.startswith("No method is better than uniform attention; the best is FavorPlus (8 features)")
    assert "Keep exact attention" in narrow.text
    assert wide.text.startswith("Take FavorPlus (16 features): relative output error 0.53, uniform attention 0.80;")
    assert "embedding 0.850, uniform 0.500" in wide.text
    found = {point.heading: point.text for point in advise(summary).doubts}
    lost = found["No better than uniform attention"]
    assert lost.endswith("all the same: FavorPlus (8 features): 38%; Taylor (40 features): 0%.")
    alone = found["Random features alone"]
    assert alone == (
        "1 of 2 measured is no better than uniform attention: the best, FavorPlus (16 features), has 0.66 × its error."
    )
    bad = found["Heads that stay above 0.3"]
    assert bad.startswith(
        "With FavorPlus (16 features), the best method measured, 4 of 4 heads: layer 1 head 1 (0.84); layer 0 head 0"
    )


def test_words_where_nothing_is_to_be_said(summary):
    good = replace(summary.lines[1], error=replace(summary.lines[1].error, mean=0.05, spread=None))
    advice = advise(replace(summary, lines=(replace(good, head_ratios=((0.1, 0.1), (0.1, 0.1))),)))
    assert advice.doubts == ()


def test_words_of_targets(summary):
    fair, good = advise(summary).targets
    assert (fair.heading, good.heading) == ("For a mean error of 0.3", "For a mean error of 0.1")
    assert fair.text.startswith("No method measured reaches it; least error: FavorPlus (16 features), error 0.53")
    small, fast, worse = (replace(line, error=replace(line.error, mean=0.2)) for line in summary.lines)
    small = replace(small, state_numbers=10, flops_per_token=900)
    fast = replace(fast, state_numbers=20, flops_per_token=100)
    fair, good = advise(replace(summary, lines=(worse, fast, small))).targets
    assert fair.text == (
        "Smallest state: FavorPlus (8 features), error 0.20, 10 numbers kept per head. Least time: FavorPlus "
        "(16 features), error 0.20, 20 numbers kept per head."
    )
    assert good.text.startswith("No method measured reaches it")
    # What was timed counts before operations.
    fair, _ = advise(replace(summary, lines=(worse, fast, replace(small, time_ratio=0.5)))).targets
    assert fair.text.startswith("Smallest state and least time: FavorPlus (8 features), error 0.20")
    assert fair.text.endswith("0.50 × softmax's time.")
    broken = tuple(replace(line, error=replace(line.error, mean=math.nan)) for line in summary.lines)
    assert advise(replace(summary, lines=broken)).targets[0].text == "No method measured reaches it."


def test_a_method_without_a_map_has_no_width(summary):
    line = replace(summary.lines[1], map="merged 8", features=0, head_ratios=((0.5, 0.5), (0.5, 1.0)))
    advice = advise(replace(summary, lines=(line,)))
    assert "Take merged 8: relative output error 0.53" in advice.budgets[1].text
    assert "least error: merged 8, error 0.53, " in advice.targets[0].text


def test_words_when_another_method_is_better_for_the_whole_model(summary):
    fixed = summary.lines[2]
    small = replace(fixed, state_numbers=90, embedding_cosine=replace(fixed.embedding_cosine, mean=0.95))
    lines = (*summary.lines[:2], small)
    text = advise(replace(summary, lines=lines)).budgets[1].text
    assert "The whole model keeps a higher cosine, 0.950, with Taylor (40 features): error 25.00." in text
    broken = replace(small, embedding_cosine=replace(fixed.embedding_cosine, mean=math.nan))
    text = advise(replace(summary, lines=(broken, *summary.lines[:2]))).budgets[1].text
    assert "higher cosine" not in text


def test_words_where_no_method_is_small_enough(summary):
    header = replace(summary.header, features=[4, 16])
    assert advise(replace(summary, header=header)).budgets[0].text == "No method measured keeps so few."


def test_a_single_random_map_reads_as_one(summary):
    advice = advise(replace(summary, lines=summary.lines[:1]))
    alone = next(point.text for point in advice.doubts if point.heading == "Random features alone")
    assert alone == (
        "The one measured is no better than uniform attention: FavorPlus (8 features) has 1.25 × its error."
    )


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("Expansion(num_centres=4)", "Expansion, order 1"),
        ("Expansion(num_centres=4, order=2) + window 16", "Expansion, order 2, with a window"),
        ("Centred(Balanced(Sderf))", "random features"),
        ("FavorPlus + window 4", "random features, with a window"),
        ("RandomRelu", "random features"),
        ("LearnedExponential + window 16", "learned maps, untrained, with a window"),
        ("EluPlusOne", "elementwise and polynomial maps"),
    ],
)
def test_families(label, name):
    assert family(label) == name


def test_a_curve_joins_what_nothing_beats(summary):
    def line(numbers, error):
        return replace(summary.lines[0], state_numbers=numbers, error=replace(summary.lines[0].error, mean=error))

    lines = [line(3, 0.5), line(1, 0.9), line(2, 1.0), line(2, math.inf), line(5, 0.4), line(3, 0.6), line(4, math.nan)]
    found = [(one.state_numbers, one.error.mean) for one in least(lines, lambda one: one.state_numbers)]
    assert found == [(1, 0.9), (3, 0.5), (5, 0.4)]


def test_tables(summary):
    table = overview(summary)
    assert table.rows[0] == ("softmax, exact", "0.00", "0.00", "100%", "1.000", "1.00", "", "384")
    assert table.rows[1][:3] == ("uniform attention", "0.80", "1.00")
    row = ("FavorPlus (8 features)", "1.00 ± 0.18", "1.25", "38%", "0.600 ± 0.141", "–", "–", "40")
    assert table.rows[2] == row
    assert heads(summary).rows[2][:3] == ("FavorPlus (8 features)", "40", "288")
    assert overview(summary, spreads=False).rows[2][1] == "1.00"
    assert end_to_end(summary).rows[0] == ("softmax, exact", "", "1.00", "1.000", "1.000")
    assert end_to_end(summary).rows[4] == ("Taylor (40 features)", "1", "–", "0.100", "0.050")
    assert heads(summary).rows[4][-2:] == ("–", "no better")
    for content in (table, end_to_end(summary), heads(summary)):
        assert {len(row) for row in content.rows} == {len(content.columns)}


def test_averaging_may_be_exact(tmp_path):
    """Of a model whose values are all alike, as those of pruned layers: there every error is 0."""
    rows = [*BASELINES, *rows_of("FavorPlus", 8, [0.0], [1.0], uniform=0.0)]
    AUDIT.write(tmp_path / "audit.jsonl", HEADER, rows)
    found = summarise_audit(tmp_path / "audit.jsonl")
    for table in (overview(found), heads(found)):
        places = [table.columns.index(name) for name in ("error", "error / uniform")]
        assert [[row[place] for place in places] for row in table.rows] == [["0.00", "1.00"]] * 3
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "could not be read" not in page


def test_a_file_with_rows_missing(tmp_path):
    path = tmp_path / "audit.jsonl"
    for rows in (
        [],
        BASELINES,
        [*BASELINES, *rows_of("FavorPlus", 8, [0.7], [0.5])][:-1],
        [*rows_of("FavorPlus", 8, [0.7], [0.5])],
    ):
        AUDIT.write(path, HEADER, rows)
        with pytest.raises(ValueError, match="is no whole audit"):
            summarise_audit(path)


@pytest.fixture
def page(summary, tmp_path):
    path = tmp_path / "index.html"
    hostile = replace(summary, header=replace(summary.header, model="</script><script>alert(1)</script>"))
    write_page(Report(audit=hostile), path)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_loads_nothing(page):
    page.check_that_nothing_is_loaded()


def test_the_page_escapes_what_it_was_given(page):
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert "alert(1)" in "".join(page.words)


def test_the_page_holds_the_heat_map(page):
    script = page.scripts[-1]
    cells = json.loads(re.search(r"const cells = (.*);", script).group(1))
    assert set(cells) == {"FavorPlus (8 features)", "FavorPlus (16 features)", "Taylor (40 features)"}
    assert cells["FavorPlus (8 features)"] == [[1.0, 1.0], [1.0, 2.0]]
    ratios = [float(at["style"].removeprefix("--ratio: ")) for tag, at in page.tags if tag == "td" and "style" in at]
    assert ratios == [ratio for row in cells["FavorPlus (16 features)"] for ratio in row]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"head-map", "state-frontier", "flops-frontier"} <= ids
    options = [attributes for tag, attributes in page.tags if tag == "option"]
    assert [("selected" in attributes) for attributes in options] == [False, True, False]


def test_the_page_holds_the_frontier(page):
    state, flops = page.figure("state-frontier"), page.figure("flops-frontier")
    limit = "matrix cut to a rank (SVD)"
    both = ["random features", "elementwise and polynomial maps"]
    baselines = ["uniform attention", "exact attention over 48 tokens"]
    assert [curve["name"] for curve in state["curves"]] == [*both, limit, *baselines]
    assert [curve["name"] for curve in flops["curves"]] == [*both, *baselines]
    random = state["curves"][0]
    assert random["x"] == [40, 80]
    assert random["y"] == pytest.approx([1.0, 0.525])
    assert random["tips"] == [
        "FavorPlus (8 features), 40 numbers: 1.000",
        "FavorPlus (16 features), 80 numbers: 0.525",
    ]
    assert flops["curves"][0]["x"] == [288, 576]
    assert state["curves"][2]["y"] == pytest.approx([0.5, 0.2])
    assert state["curves"][3]["y"] == pytest.approx([0.8, 0.8])
    assert state["curves"][4]["x"] == [48 * 8] * 2
    assert flops["curves"][3]["x"] == [2 * 48 * 8] * 2
    for chart in (state, flops):
        assert chart["x"]["is_logarithmic"]
        assert chart["y"]["is_logarithmic"]
    assert "cut to its best rank" in page.text


def test_the_page_of_a_text_too_long_for_the_limit(summary, tmp_path):
    write_page(Report(audit=replace(summary, limits=())), tmp_path / "long.html")
    page = Page((tmp_path / "long.html").read_text(encoding="utf-8"))
    assert "The limit of the rank is not measured: linattn audit --full takes it" in page.text
    assert "matrix cut to a rank (SVD)" not in {curve["name"] for curve in page.figure("state-frontier")["curves"]}


def test_the_page_has_the_words_and_the_end_to_end_table(page):
    words = " ".join("".join(page.words).split())
    assert "Take FavorPlus (16 features)" in words
    assert "No better than uniform attention" in words
    assert "uniform attention" in words
