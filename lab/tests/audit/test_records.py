"""Audit files: whole or absent, and read back as written."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from linattn.records.files import atomic_file
from linattn_lab.audit.records import AUDIT, Header, HeadRow, ModelRow, RankRow
from linattn_lab.texts import Text

HEADER = Header({"torch": "2"}, "m", "M", False, 1, 1, 2, 2, "t", "0", 8, 0, 8, ["Relu"], [64], 1, 0)
HEAD = HeadRow(0, 0, "Relu", 2, 0, None, 0.1, 0.7, 0.2, 0.6, None, 0.3, 1.0, 1.5, 4.0, 0.9, None, 6, 20)
MODEL = ModelRow("Relu", 2, 0, 0.25, 0.125)


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "audit.jsonl"
    rows = [MODEL, HEAD, replace(HEAD, error=math.inf, total_variation=0.1 + 0.2), replace(HEAD, kl=1e-300)]
    rows.append(RankRow(0, 0, 4, 12, 0.5))
    AUDIT.write(path, HEADER, rows)
    assert AUDIT.read(path) == (HEADER, rows)
    assert [name.name for name in path.parent.iterdir()] == ["audit.jsonl"]


def test_nan_and_infinity_are_plain_json(tmp_path):
    path = tmp_path / "audit.jsonl"
    AUDIT.write(path, HEADER, [replace(MODEL, embedding_cosine=math.nan), replace(HEAD, error=math.inf)])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "model", "head"]
    _, (model, head) = AUDIT.read(path)
    assert math.isnan(model.embedding_cosine)
    assert head.error == math.inf


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ZeroDivisionError])
def test_an_early_end_leaves_what_was_there(tmp_path, ending):
    def rows():
        yield MODEL
        raise ending

    path = tmp_path / "audit.jsonl"
    with pytest.raises(ending):
        AUDIT.write(path, HEADER, rows())
    assert not list(tmp_path.iterdir())
    AUDIT.write(path, HEADER, [MODEL])
    before = path.read_bytes()
    with pytest.raises(ending):
        AUDIT.write(path, HEADER, rows())
    assert [name.name for name in tmp_path.iterdir()] == ["audit.jsonl"]
    assert path.read_bytes() == before


def test_nothing_shows_under_the_name_before_the_end(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_file(path) as file:
        file.write("half")
        assert not path.exists()
    assert path.read_text() == "half"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "its first line, and no other, must be the header"),
        ([{"kind": "model"}], "wanted"),
        ([{"kind": "other"}], "is no row of an audit"),
        ([[1]], "is no row of an audit"),
    ],
)
def test_files_that_are_no_audit(tmp_path, lines, words):
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=words):
        AUDIT.read(path)


def test_a_second_header(tmp_path):
    path = tmp_path / "audit.jsonl"
    AUDIT.write(path, HEADER, [])
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match="must be the header"):
        AUDIT.read(path)


def test_built_in_text_is_long_prose():
    text = Text.read()
    assert text.source == "pydoc topics"
    words = text.content.split()
    assert len(words) > 20_000
    # Prose: of the first thousand words nine in ten are letters with at most punctuation around them.
    assert sum(word.strip(".,;:()[]*“”‘’\"'").isalpha() for word in words[:1000]) > 850
    assert text.sha256 == Text.read().sha256


def test_text_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("naïve\n", encoding="utf-8")
    assert Text.read(path).content == "naïve\n"
    # A mark that some programs put before UTF-8 is no part of a text.
    path.write_bytes("\ufeffnaïve\r\n".encode())
    assert Text.read(path) == Text(str(path), "naïve\n")
    with pytest.raises(FileNotFoundError, match="there is no text file"):
        Text.read(tmp_path / "b.txt")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text in UTF-8"):
        Text.read(path)
    path.write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        Text.read(path)
