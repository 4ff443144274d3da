"""Pictures of README.md and of the site: no label lies on another, and each page has its colours."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from itertools import combinations, product
from pathlib import Path

import pytest

from linattn_lab.kv_audit.names import BOUNDED, FULL, UNIFORM
from linattn_lab.kv_audit.records import MEMORY
from linattn_lab.report.memory.summary import summarise_memory
from memory_rows import MEMORY_HEADER, memory_passage

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def _docs(monkeypatch):
    """Modules of docs/ are found."""
    monkeypatch.syspath_prepend(str(DOCS))


@pytest.fixture
def audit():
    return json.loads((DOCS / "figures.json").read_text(encoding="utf-8"))["audit"]


@pytest.fixture
def memory(tmp_path):
    """Curves of four methods over three budgets that lie near each other, the smallest in fewest bytes."""
    rows = [memory_passage(0, FULL, 0.0, budget=0), memory_passage(0, UNIFORM, 1.3, budget=0)]
    rows = [replace(row, num_bytes=900_000) for row in rows]
    names = (BOUNDED, "merged keys", "sinks + window", "sinks + window in 2 bits", "sinks + window in 4 bits")
    for budget, (place, name) in product((64, 128, 256), enumerate(names)):
        row = memory_passage(0, name, 4.0 * (1 + 0.05 * place) / budget, budget=budget)
        rows.append(replace(row, num_bytes=1000 * budget, unmerged=min(budget / 200, 1.0)))
    header = replace(MEMORY_HEADER, budgets=[64, 128, 256], kinds=list(names), tasks=[])
    MEMORY.write(tmp_path / "memory.jsonl", header, rows)
    return summarise_memory(tmp_path / "memory.jsonl")


def boxes(figure):
    """All words of a picture that are seen, and where they stand, frames included."""
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = [*axes.texts, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    seen = [text for text in texts if text.get_text() and axes.axison | (text in axes.texts)]
    return [
        (text.get_text(), (text.get_bbox_patch() or text).get_window_extent())
        for text in seen
        if figure.bbox.contains(*text.get_window_extent().min)
    ]


def test_no_words_overlap_others(audit, memory):
    from draw_figures import pictures
    from memory_tables import MEMORY as FIGURES
    from memory_tables import audits_of

    for summary in (memory, audits_of(FIGURES)[0]):
        for name, figure in pictures(audit, summary).items():
            places = boxes(figure)
            assert len(places) > 8, name
            assert [(a, b) for (a, x), (b, y) in combinations(places, 2) if x.overlaps(y)] == [], name


def test_a_method_is_a_curve_with_one_label_and_windows_have_their_best_bits(memory):
    from draw_figures import kl_against_bytes
    from memory_tables import MEMORY as FIGURES
    from memory_tables import audits_of
    from picture_labels import crossed, overlaps

    assert crossed(kl_against_bytes(audits_of(FIGURES)[0]).axes[0]) == []
    (axes,) = kl_against_bytes(memory).axes
    labels = [text.get_text() for text in axes.texts]
    assert sorted(labels) == sorted(
        [UNIFORM, "full cache\n(KL 0)", BOUNDED, "merged keys", "sinks + window", "sinks + window in few bits"]
    )
    assert overlaps(axes) == []
    first = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    assert list(first.get_ydata()) == [4.0 / 64, 4.0 / 128, 4.0 / 256]
    hollow = [line for line in axes.lines if line.get_marker() == "o" and line.get_markerfacecolor() == "none"]
    # At the largest budget alone every token is held.
    assert {line.get_xdata()[0] for line in hollow} == {0.256}


def test_labels_without_room_are_refused(audit, monkeypatch):
    import picture_labels
    from draw_figures import error_against_bytes

    monkeypatch.setattr(picture_labels, "adjust_text", lambda texts, *_, **__: (texts, []))
    with pytest.raises(ValueError, match="no room for the labels"):
        error_against_bytes(audit)


def test_dark_pictures_have_dark_pages_colours_and_no_file_says_when_it_was_drawn():
    from picture_labels import LIGHT

    files = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("*-*.svg")}
    assert len(files) == 6
    for name, text in files.items():
        assert "<dc:date>" not in text
        assert any(colour in text for colour in astuple(LIGHT)) == name.endswith("-light.svg")


def test_a_picture_is_the_same_on_another_processor():
    """Its labels are placed by sums, which are rounded otherwise there."""
    from draw_figures import is_redrawn

    picture = '<path d="M 548.268557 273.158476"/><text>Expansion 16</text>'
    assert not is_redrawn(picture, picture.replace("548.268557", "548.263526"))
    assert is_redrawn(picture, picture.replace("548.268557", "548.5"))
    assert is_redrawn(picture, picture.replace("Expansion 16", "Expansion 17"))
    assert is_redrawn(picture, picture.replace("Expansion", "merged"))
