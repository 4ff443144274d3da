"""A damaged file is named on the page, the others are shown as they were, and nothing crashes."""

from __future__ import annotations

import json
import math
import random
import shutil

import pytest

from linattn_lab.audit.records import AUDIT
from linattn_lab.bench.records import BENCH
from linattn_lab.experiments.records import CLAIMS
from linattn_lab.kv_audit.records import MEMORY
from linattn_lab.report import write_report
from pages import Page

TITLES = {
    "audit.jsonl": "The error of linear attention on",
    "memory.jsonl": "lose by a bounded KV cache?",
    "claims.jsonl": "What is said of linear attention, and what holds",
    "bench.jsonl": "From which length on does linear attention pay?",
}
DAMAGES = 35
# Fields that files of earlier versions lack.
OPTIONAL = ("left_out", "layers", "windowed", "longest", "num_key_heads", "weights_sha256")
OF_MEMORY = ("left_out", "calibration", "weights_sha256", "ending", "written")
OTHERS = (None, True, "text", "", "nan", "inf", -1, 0, 1e308, -1e308, 1e-308, 10**15, 10**30, 10**400, [], {}, [[]])


def beside(name):
    """The file that is to stay as it was."""
    files = list(TITLES)
    return files[files.index(name) - 1]


@pytest.fixture
def page_of(whole, tmp_path):
    """A function that writes the page of one file, its content replaced, and another."""

    def of(name, content):
        other = beside(name)
        shutil.rmtree(tmp_path / "report", ignore_errors=True)
        (tmp_path / "report").mkdir()
        shutil.copy2(whole / other, tmp_path / "report" / other)
        (tmp_path / "report" / name).write_bytes(content)
        return Page(write_report(tmp_path / "report").read_text(encoding="utf-8"))

    return of


def in_bytes(content, chance):
    """Cut, overwritten, doubled or torn, without regard to lines."""
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.choice((1, 2, 10, 1000)))
    noise = chance.randbytes(end - start)
    return chance.choice(
        (
            content[:start],
            content[start:],
            content[:start] + content[end:],
            content[:start] + noise + content[end:],
            content[:start] + bytes(end - start) + content[end:],
            content[:end] + content[start:],
            content[:start] + b"[" * 100_000 + content[end:],
        )
    )


def in_lines(content, chance):
    """Lines lost, doubled or in another order."""
    lines = content.splitlines(keepends=True)
    where = chance.randrange(len(lines))
    kind = chance.randrange(4)
    if kind == 0:
        del lines[where]
    elif kind == 1:
        lines.insert(chance.randrange(len(lines)), lines[where])
    elif kind == 2:
        chance.shuffle(lines)
    else:
        lines.insert(where, b"\n")
    return b"".join(lines)


def in_values(content, chance):
    """One value of one line replaced or left out, or a number multiplied."""
    lines = content.splitlines(keepends=True)
    where = chance.choice((0, chance.randrange(len(lines))))
    row = json.loads(lines[where])
    name = chance.choice(list(row))
    kind = chance.randrange(3)
    if kind == 0:
        del row[name]
    elif kind == 1 and isinstance(row[name], int | float):
        row[name] = chance.choice((row[name] * 1e9, row[name] + 1, -row[name], math.nan, math.inf, 0))
    elif kind == 1 and isinstance(row[name], list):
        row[name] = [*row[name], chance.choice(OTHERS)][chance.randrange(2) :]
    else:
        row[name] = chance.choice((*OTHERS, "\ud800", "</script>\u2028"))
    lines[where] = json.dumps(row).encode() + b"\n"
    return b"".join(lines)


@pytest.mark.parametrize("damaged", [in_bytes, in_lines, in_values])
@pytest.mark.parametrize("name", TITLES)
def test_no_damage_costs_more_than_its_own_file(whole, page_of, name, damaged):
    chance = random.Random(f"{name} {damaged.__name__}")
    for number in range(DAMAGES):
        page = page_of(name, damaged((whole / name).read_bytes(), chance))
        assert TITLES[beside(name)] in page.text
        assert page.text.count("could not be read") == (TITLES[name] not in page.text), f"damage {number}"
        assert (f"{name} could not be read" in page.text) == (TITLES[name] not in page.text), f"damage {number}"
        page.check_that_nothing_is_loaded()


def rows_of(whole, name):
    """The values of a file's lines."""
    return [json.loads(line) for line in (whole / name).read_text(encoding="utf-8").splitlines()]


FORMS = {"audit.jsonl": AUDIT, "memory.jsonl": MEMORY, "claims.jsonl": CLAIMS, "bench.jsonl": BENCH}


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_every_field_has_its_type(whole, tmp_path, name, form):
    """No field of any kind of line passes with a value of another type; one with a default may be missing."""
    rows = {row["kind"]: row for row in rows_of(whole, name)}
    path = tmp_path / name
    for kind, row in rows.items():
        for field in set(row) - {"kind"}:
            for other in ({"a": {}}, [{}], b"lost", "\ud800", 10**400):
                values = {key: value for key, value in row.items() if key != field}
                values |= {} if other == b"lost" else {field: other}
                lines = [values] if kind == "header" else [rows["header"], values]
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
                if other == b"lost" and field in (OF_MEMORY if form is MEMORY else OPTIONAL):
                    form.read(path)
                else:
                    with pytest.raises(ValueError, match=f"{name}:{len(lines)}.*{field}"):
                        form.read(path)


@pytest.mark.parametrize("name", TITLES)
def test_the_damaged_line_is_named(whole, page_of, name):
    lines = (whole / name).read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:-20] + b"\n"
    assert f"{name}:3" in page_of(name, b"".join(lines)).text


@pytest.mark.parametrize("name", TITLES)
def test_a_file_that_cannot_be_opened_is_named(whole, page_of, tmp_path, name):
    page_of(name, b"")
    (tmp_path / "report" / name).unlink()
    (tmp_path / "report" / name).mkdir()
    page = Page(write_report(tmp_path / "report").read_text(encoding="utf-8"))
    assert f"{name} could not be read" in page.text


@pytest.mark.parametrize(("number", "field"), [(1, "prefill_seconds"), (3, "num_bytes"), (3, "kl")])
def test_figures_that_no_answer_can_be_made_of_cost_their_own_file_alone(whole, page_of, number, field):
    """A prefill that took no time, a cache of no bytes, a KL that is no number: the answers divide by them."""
    rows = rows_of(whole, "memory.jsonl")
    rows[number][field] = "nan" if field == "kl" else 0
    text = page_of("memory.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()).text
    assert TITLES[beside("memory.jsonl")] in text
    assert ("memory.jsonl could not be read" in text) == (field == "prefill_seconds")


def test_a_text_without_a_digest_has_none(whole, page_of):
    header, *rows = rows_of(whole, "memory.jsonl")
    lines = [{**header, "texts_sha256": {}}, *rows]
    text = page_of("memory.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()).text
    assert "SHA-256 –" in text


def test_figures_that_contradict_each_other_are_named(whole, page_of):
    """A benchmark of no length: every line is what it should be, and there is nothing to draw."""
    header = {**rows_of(whole, "bench.jsonl")[0], "lengths": []}
    text = page_of("bench.jsonl", json.dumps(header).encode() + b"\n").text
    assert "bench.jsonl could not be read" in text
    assert "its figures contradict each other" in text
    assert TITLES[beside("bench.jsonl")] in text
