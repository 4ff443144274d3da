"""Unfinished files: rows survive an early end, and nothing half-written is taken for a row."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from linattn_lab.audit.records import AUDIT, Header, ModelRow

HEADER = Header({"torch": "2"}, "m", "M", False, 1, 1, 2, 2, "t", "0", 8, 0, 8, ["Relu"], [64], 1, 0)
ROWS = [ModelRow("Relu", 2, draw, 0.25, 0.125) for draw in range(4)]


def ending_after(number):
    """The first rows, then an interrupt."""
    yield from ROWS[:number]
    raise KeyboardInterrupt


def test_rows_survive_an_interrupt_and_are_gone_on_from(tmp_path):
    path = tmp_path / "new" / "audit.partial.jsonl"
    assert AUDIT.unfinished(path) is None
    with pytest.raises(KeyboardInterrupt):
        AUDIT.extend(path, HEADER, [], ending_after(2))
    assert AUDIT.unfinished(path) == (HEADER, ROWS[:2])
    AUDIT.extend(path, HEADER, ROWS[:2], ROWS[2:])
    assert AUDIT.read(path) == (HEADER, ROWS)
    assert [name.name for name in path.parent.iterdir()] == ["audit.partial.jsonl"]


def test_each_row_is_in_the_file_before_the_next_is_measured(tmp_path):
    path = tmp_path / "audit.partial.jsonl"

    def rows():
        for number, row in enumerate(ROWS):
            assert AUDIT.unfinished(path) == (HEADER, ROWS[:number])
            yield row

    AUDIT.extend(path, HEADER, [], rows())


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path, cut):
    path = tmp_path / "audit.partial.jsonl"
    AUDIT.extend(path, HEADER, [], ROWS)
    path.write_bytes(path.read_bytes()[:-cut])
    assert AUDIT.unfinished(path) == (HEADER, ROWS[:3])


def test_what_was_kept_replaces_what_was_there(tmp_path):
    path = tmp_path / "audit.partial.jsonl"
    AUDIT.extend(path, HEADER, [], ROWS)
    other = replace(HEADER, seed=1)
    AUDIT.extend(path, other, [], ROWS[:1])
    assert AUDIT.unfinished(path) == (other, ROWS[:1])


@pytest.mark.parametrize("content", ["", "\n", "no JSON\n", '{"kind": "header"}\n', "\N{SNOWMAN}"])
def test_a_file_that_is_something_else(tmp_path, content):
    path = tmp_path / "audit.partial.jsonl"
    path.write_text(content, encoding="utf-8")
    assert AUDIT.unfinished(path) is None


# What str.splitlines takes for the end of a line, beside the line feed.
BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("character", BREAKS)
def test_only_a_line_feed_ends_a_line(tmp_path, character):
    path = tmp_path / "audit.jsonl"
    header = replace(HEADER, model=f"two{character}parts")
    rows = [replace(row, map=f"{character}{row.map}{character}") for row in ROWS]
    AUDIT.extend(path, header, [], rows)
    assert AUDIT.read(path) == AUDIT.unfinished(path) == AUDIT.so_far(path) == (header, rows)


def test_a_line_cut_off_within_a_character_costs_no_other(tmp_path):
    path = tmp_path / "audit.jsonl"
    AUDIT.extend(path, HEADER, [], [*ROWS, replace(ROWS[0], map="\N{GREEK SMALL LETTER OMEGA}")])
    content = path.read_bytes()
    path.write_bytes(content[: content.index("\N{GREEK SMALL LETTER OMEGA}".encode()) + 1])
    assert AUDIT.unfinished(path) == (HEADER, ROWS)


def test_fields_with_defaults_may_be_missing(tmp_path):
    path = tmp_path / "audit.jsonl"
    AUDIT.write(path, HEADER, ROWS)
    line, *others = path.read_text().splitlines(keepends=True)
    values = json.loads(line)
    del values["left_out"], values["longest"]
    path.write_text(json.dumps(values) + "\n" + "".join(others))
    assert AUDIT.read(path) == (HEADER, ROWS)
