"""A report of a bounded KV cache: what is lost comes first, and every figure is the file's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from linattn_lab.kv_audit.intervals import paired_ratio
from linattn_lab.kv_audit.names import BOUNDED, FULL, UNIFORM
from linattn_lab.kv_audit.records import MEMORY, TaskRow
from linattn_lab.report import write_report
from linattn_lab.report.memory.figures import kl_by_bytes
from linattn_lab.report.memory.summary import best_bits, summarise_memory
from linattn_lab.report.memory.words import glance, lost, setting_words, table_at
from memory_rows import MEMORY_HEADER, memory_facts, memory_passage
from pages import Page

ROWS = [
    memory_passage(0, FULL, 0.0, budget=0, written=" and <b> the sea"),
    memory_passage(0, UNIFORM, 0.8, budget=0, written=" the the the"),
    memory_passage(0, BOUNDED, 0.1, written=" and <b> the seal"),
    memory_passage(0, "sinks + window", 0.2),
    memory_passage(0, "sinks + window in 2 bits", 0.3),
    memory_passage(0, "sinks + window in 3.5 bits", 0.16),
    replace(memory_passage(1, FULL, 0.0, budget=0), prefill_seconds=1.0),
    memory_passage(1, UNIFORM, 0.8, budget=0),
    memory_passage(1, BOUNDED, 0.2),
    memory_passage(1, "sinks + window", 0.4),
    memory_passage(1, "sinks + window in 2 bits", 0.3),
    memory_passage(1, "sinks + window in 3.5 bits", 0.16),
    memory_facts(FULL, [1.0, 0.8], 0),
    TaskRow("vt", 0, 600, FULL, FULL, 0, [], [0.4]),
    memory_facts(BOUNDED, [1.0, 0.2]),
    memory_facts("sinks + window", [0.5, 0.0]),
]


@pytest.fixture
def summary(tmp_path):
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, ROWS)
    return summarise_memory(tmp_path / "memory.jsonl")


def line(summary, method):
    return next(line for line in summary.lines if line.method == method)


def test_means_and_tails_over_passages(summary):
    found = line(summary, "sinks + window")
    assert (found.passages, found.kl) == (2, pytest.approx(0.3))
    assert found.perplexity == pytest.approx(8 * math.sqrt(1.2 * 1.4))
    assert found.kl_median == pytest.approx(0.15)
    assert found.kl_largest == 10 * 0.4
    assert found.peak_bytes == 5001
    assert (found.prefill_seconds.median, found.prefill_seconds.low, found.prefill_seconds.high) == (1.5, 1.0, 2.0)
    assert found.parted == 20.5
    assert found.kl_by_text == {"prose": pytest.approx(0.3)}
    assert found.facts == {"90%": 0.5, "10%": 0.0}


def test_a_ratio_is_paired_by_passage(summary):
    assert line(summary, "sinks + window").kl_ratio == paired_ratio([0.2, 0.4], [0.1, 0.2])
    assert line(summary, "sinks + window in 2 bits").kl_ratio.mean == pytest.approx(math.sqrt(4.5))
    assert line(summary, FULL).kl_ratio is None


def test_methods_of_an_interrupted_audit_are_compared_on_the_same_texts(tmp_path):
    """The second passage, and the second text of a task, which some methods have not read yet, count for none."""
    second = [TaskRow("facts", 1, 600, FULL, FULL, 0, [0.9, 0.1], [1.0, 1.0])]
    second += [replace(second[0], method=BOUNDED, label=BOUNDED, budget=64)]
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, [*ROWS[:9], *ROWS[12:], *second])
    found = summarise_memory(tmp_path / "memory.jsonl")
    assert {one.passages for one in found.lines} == {1}
    assert line(found, BOUNDED).kl == 0.1
    assert line(found, "sinks + window in 2 bits").kl_ratio.mean == pytest.approx(3.0)
    assert line(found, FULL).facts == {"90%": 1.0, "10%": 0.8}
    assert line(found, BOUNDED).facts == {"90%": 1.0, "10%": 0.2}


def test_an_unfinished_audit_says_how_many_passages_its_figures_are_of(tmp_path, summary):
    assert "Unfinished" not in setting_words(summary)
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, ROWS[:9])
    found = summarise_memory(tmp_path / "memory.jsonl")
    assert "Unfinished: the figures are of 1 of 2 passages, and tasks may be missing." in setting_words(found)
    # Passages alone, and one of two lengths.
    for header, rows in ((MEMORY_HEADER, ROWS[:12]), (replace(MEMORY_HEADER, lengths=[600, 900]), ROWS)):
        MEMORY.write(tmp_path / "memory.jsonl", header, rows)
        assert not summarise_memory(tmp_path / "memory.jsonl").is_finished


def test_more_samples_may_show_that_the_full_cache_fails_a_task(tmp_path):
    """Methods have the first sample alone then, of an audit before: they are scored no more."""
    facts = [memory_facts(FULL, [1.0, 1.0], 0), replace(memory_facts(FULL, [0.6, 0.6], 0), sample=1)]
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, [*ROWS[:12], *facts, memory_facts(BOUNDED, [1.0, 1.0])])
    found = summarise_memory(tmp_path / "memory.jsonl")
    assert found.unanswered == {"facts at 600": pytest.approx(0.8)}
    assert line(found, BOUNDED).facts == {}


def test_windows_in_few_bits_stand_with_their_best(summary):
    assert [one.method for one in summary.at(600, 64)] == [BOUNDED, "sinks + window in 3.5 bits", "sinks + window"]


def test_a_window_in_fewer_bits_stands_beside_it_where_it_solves_more_tasks(tmp_path):
    kinds = ("full cache", "sinks + window in 4 bits", "sinks + window in 2 bits")
    scored = [
        TaskRow("niah_single", 0, 600, kind, kind, 64 * bool(n), [], [s])
        for n, (kind, s) in enumerate(zip(kinds, (1, 0, 1), strict=True))
    ]
    rows = [memory_passage(0, kind, 0.1 * n, budget=64 * bool(n)) for n, kind in enumerate(kinds)]
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, [*rows, *scored])
    found = summarise_memory(tmp_path / "memory.jsonl")
    assert [line.method for line in best_bits(found.at(600, 64))] == list(kinds[1:])


def test_a_window_in_fewer_bits_stands_beside_it_where_it_retrieves_more(tmp_path):
    names = [f"sinks + window in {bits} bits" for bits in (4, 3, 5, 2)]
    shares = [[0.9, 0.1], [1.0, 0.9], [0.9, 0.1], [0.9, 0.8]]
    rows = [*ROWS[:2], *(memory_passage(0, name, 0.1 * (1 + n)) for n, name in enumerate(names))]
    rows += [memory_facts(name, hits) for name, hits in zip(names, shares, strict=True)]
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, rows)
    assert [one.method for one in summarise_memory(tmp_path / "memory.jsonl").at(600, 64)] == names[:2]


def test_the_verdict_stands_between_the_full_cache_the_best_window_and_uniform_attention(summary):
    text = lost(summary).text
    assert text.startswith(
        "At 600 tokens of small the bounded cache takes 106.4% of the full cache's bytes, 50% of the "
    )
    # Means over depths of 100 % and 20 %, and of 100 % and 80 %; a prefill of 1.5 s beside one of 1 s.
    assert "tokens unmerged: KL 0.1500, needles 60% of 90%; prefill takes 1.50 ×, decode 1.00 × as long." in text
    assert "In the same bytes, sinks + window in 3.5 bits: KL 0.1600. Uniform attention: KL 0.8000." in text


def test_written_forms_alone_are_an_audit(tmp_path):
    written = memory_passage(0, "window 64 + merged 512 in 4 bits", 0.1, budget=0)
    MEMORY.write(tmp_path / "memory.jsonl", replace(MEMORY_HEADER, tasks=[]), [*ROWS[:2], written])
    found = summarise_memory(tmp_path / "memory.jsonl")
    assert found.settings == [(600, 0)]
    assert lost(found).text.startswith("At 600 tokens of small the window 64 + merged 512 in 4 bits takes 100.0%")
    table = glance(found, *found.hardest)
    assert [row[0] for row in table.rows] == [FULL, UNIFORM, "window 64 + merged 512 in 4 bits"]
    assert table.baselines == 2


def test_an_audit_of_baselines_alone_has_no_verdict_yet(tmp_path):
    MEMORY.write(tmp_path / "memory.jsonl", replace(MEMORY_HEADER, tasks=[]), ROWS[:2])
    assert "not finished" in lost(summarise_memory(tmp_path / "memory.jsonl")).text
    assert write_report(tmp_path).is_file()


def test_what_decides_is_seen_at_a_glance(summary):
    table = glance(summary, 600, 64)
    assert table.columns == ("method", "MB", "unmerged", "KL", "needles 90/10%", "prefill s", "tokens/s")
    assert table.rows[2] == (BOUNDED, "0.00", "50%", "0.1500", "100/20%", "1.5", "10")
    assert [row[4] for row in table.rows] == ["100/80%", "–", "100/20%", "–", "50/0%"]


def test_a_text_goes_on_beside_the_full_cache_s(summary):
    """Parted in whole words, those that are the full cache's first; methods of the first passage that have words."""
    (one,) = summary.continuations
    assert (one.text, one.num_tokens, one.budget, one.ending) == ("prose", 600, 64, "a river")
    assert [(each.method, each.alike, each.other) for each in one.written] == [
        (FULL, "and <b> the sea", ""),
        (BOUNDED, "and <b> the", "seal"),
        (UNIFORM, "", "the the the"),
    ]


def test_a_file_of_an_earlier_version_has_no_continuations(tmp_path):
    rows = [replace(row, ending="", written="") for row in ROWS if not isinstance(row, TaskRow)]
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, rows)
    text = (tmp_path / "memory.jsonl").read_text(encoding="utf-8")
    (tmp_path / "memory.jsonl").write_text(text.replace(', "ending": "", "written": ""', ""), encoding="utf-8")
    assert "ending" not in (tmp_path / "memory.jsonl").read_text(encoding="utf-8")
    assert summarise_memory(tmp_path / "memory.jsonl").continuations == ()


def test_a_task_that_the_full_cache_fails_is_told_and_not_shown(summary):
    assert summary.unanswered == {"vt at 600": 0.4}
    assert "vt at 600 tokens is not scored: the full cache itself has 40%." in setting_words(summary)
    assert "vt" not in table_at(summary, 600, 64).columns


def test_a_task_whose_other_methods_are_still_to_come_is_not_told_as_failed(tmp_path):
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, ROWS[:14])
    found = summarise_memory(tmp_path / "memory.jsonl")
    assert found.unanswered == {"vt at 600": 0.4}
    assert "facts at 600" not in setting_words(found)


def test_table_has_baselines_first_and_the_least_divergence_next(summary):
    table = table_at(summary, 600, 64)
    assert [row[0].partition(":")[0] for row in table.rows] == [
        FULL,
        UNIFORM,
        BOUNDED,
        "sinks + window in 3.5 bits",
        "sinks + window",
    ]
    assert table.baselines == 2
    assert table.columns[-2:] == ("needles at 90%", "needles at 10%")
    assert [row[-1] for row in table.rows] == ["80%", "–", "20%", "–", "0%"]
    ratios = dict(zip((row[0].partition(":")[0] for row in table.rows), (row[8] for row in table.rows), strict=True))
    assert ratios["sinks + window"] == "2.00 × (2.00 to 2.00)"
    assert ratios[BOUNDED] == "–"


def test_one_figure_has_no_range(tmp_path):
    """Where one passage was read."""
    rows = [
        memory_passage(0, FULL, 0.0, budget=0),
        memory_passage(0, UNIFORM, 0.8, budget=0),
        memory_passage(0, BOUNDED, 0.1),
    ]
    MEMORY.write(tmp_path / "memory.jsonl", MEMORY_HEADER, rows)
    alone = summarise_memory(tmp_path / "memory.jsonl")
    table = table_at(alone, *alone.hardest)
    for name in ("prefill s", "tokens/s"):
        assert " to " not in "".join(row[table.columns.index(name)] for row in table.rows)


def test_chart(summary):
    chart = kl_by_bytes(summary, 600)
    assert chart.curves[0].name == BOUNDED
    assert chart.curves[0].x == (1064e-6,)
    assert chart.curves[0].y == (pytest.approx(0.15),)
    # Up to the full cache's bytes.
    assert (chart.curves[-1].name, chart.curves[-1].x) == (UNIFORM, (1064e-6, 1000e-6))


def test_a_file_without_figures_says_so(tmp_path):
    MEMORY.write(tmp_path / "memory.jsonl", replace(MEMORY_HEADER, tasks=[]), [])
    with pytest.raises(ValueError, match="no figures yet"):
        summarise_memory(tmp_path / "memory.jsonl")


def test_page_has_what_is_lost_on_its_first_screen(tmp_path, summary):
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    assert text.index("What does a bounded KV cache lose?") < text.index("Should I linearize this model?")
    assert "sinks + window" in text
    assert "prose: letters" in text


def test_the_setting_says_how_many_predictions_were_measured(summary):
    """Those of half a passage at most, of each length."""
    assert "divergence of the last 300 predictions" in setting_words(summary)
    shorter = replace(summary, header=replace(summary.header, lengths=[256, 600, 4096]))
    assert "divergence of the last 128 or 300 predictions" in setting_words(shorter)
