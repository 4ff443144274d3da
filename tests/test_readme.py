"""The README is short, and every table and drawing of it and of the site is what its file of results gives."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from linattn_lab.audit.records import AUDIT, Header, HeadRow, ModelRow, TimeRow
from linattn_lab.experiments import EXPERIMENTS, reproduction
from linattn_lab.experiments.records import CLAIMS
from linattn_lab.experiments.reproduction import Reproduction
from linattn_lab.kv_audit.names import BOUNDED, FULL, UNIFORM
from linattn_lab.kv_audit.records import MEMORY
from linattn_lab.report.memory.summary import summarise_memory
from memory_rows import MEMORY_HEADER, memory_facts, memory_passage
from trials import Trial

README = Path(__file__).parents[1] / "README.md"
# What fits on two screens.
_MOST_LINES = 90


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= _MOST_LINES
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(links) > 20
    assert [link for link in links if "://" not in link and not (README.parent / link).exists()] == []


def test_links_to_a_heading_lead_to_one():
    """As a repository's host names it: in small letters, punctuation left out, a hyphen for each space."""
    links = re.findall(r"\]\(([\w/]+\.md)#([^)]+)\)", README.read_text(encoding="utf-8"))
    assert len(links) >= 3
    for page, anchor in links:
        heads = re.findall(r"(?m)^#+ (.*)$", (README.parent / page).read_text(encoding="utf-8"))
        assert anchor in {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}, (page, anchor)


def test_every_extra_is_told_with_what_it_adds():
    extras = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = dict(re.findall(r"\| `([\w-]+)` \| (.*?) \|", (README.parent / "docs" / "install.md").read_text()))
    assert set(told) == set(extras)
    for name in ("cli", "lab"):
        assert told[name].split(", ") == [one.partition(">=")[0] for one in extras[name]]


@pytest.fixture
def writer(monkeypatch):
    """docs/write_tables.py."""
    monkeypatch.syspath_prepend(str(README.parent / "docs"))
    spec = importlib.util.spec_from_file_location("write_tables", README.parent / "docs" / "write_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_what_its_file_of_results_gives(writer):
    """Figures are written by docs/write_tables.py; none is written by hand, and none is of an earlier file."""
    contents = writer.written()
    assert {README, README.parent / "docs" / "claims.md", README.parent / "docs" / "cli.md"} <= set(contents)
    assert [*writer.changed(contents)] == [], "not what their figures give; run `make readme`"


@pytest.fixture
def audited(tmp_path):
    """A folder with a small audit of a bounded KV cache."""
    rows = [
        memory_passage(0, FULL, 0.0, budget=0),
        memory_passage(0, UNIFORM, 1.5, budget=0),
        memory_passage(0, BOUNDED, 0.00042),
        replace(memory_passage(0, "sinks + window", 0.4), label="sinks 4 + window 396 + 1 in 8 bits"),
        memory_passage(0, "merged keys", 0.05),
        replace(memory_passage(0, "bounded cache, far", 0.1), unmerged=1.0),
        memory_facts(FULL, [1.0, 0.8], 0),
        memory_facts(BOUNDED, [0.9, 0.1]),
    ]
    MEMORY.write(tmp_path / "memory.jsonl", replace(MEMORY_HEADER, num_passages=1, tasks=["facts"]), rows)
    return tmp_path


def test_the_readme_shows_quality_and_speed_of_a_method_in_one_row(writer, audited, monkeypatch):
    """Times over the full cache's."""
    import memory_tables

    file = audited / "memory.json"
    memory_tables.take_memory([audited], file)
    monkeypatch.setattr(memory_tables, "MEMORY", file)
    words, _, head, _, *rows = memory_tables.readme_table().splitlines()
    assert "one passage of 600 tokens of each of prose" in words
    assert "budget 64 tokens per layer" in words
    assert "share of the digits predicted of 1 number, stated once, at each of 90%, 10% of one text." in words
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, *rows)]
    assert [row[0] for row in cells] == [
        "method",
        FULL,
        UNIFORM,
        f"**{BOUNDED}**",
        'bounded cache, `recall="far"`; nothing merged or evicted',
        "sinks + window",
    ]
    columns = dict(zip(cells[0], cells[3], strict=True))
    assert (columns["KL, mean ↓"], columns["KL, median ↓"]) == ("0.00042", "0.00021")
    assert (columns["fit unmerged ↑"], columns["needles ↑"]) == ("50%", "90%, 10%")
    assert (cells[1][-2:], cells[2][5]) == (["1.00", "1.00"], "–")


def test_figures_that_are_kept_are_those_of_the_report(writer, audited):
    """A table a length and budget, of every audit that is taken."""
    import memory_tables

    file = audited / "memory.json"
    memory_tables.take_memory([audited, audited], file)
    summary = summarise_memory(audited / "memory.jsonl")
    assert memory_tables.audits_of(file) == [summary, summary]
    assert memory_tables.memory_table(file).count("**600 tokens within the bytes of 64 float32 keys**") == 2
    file.write_text(file.read_text().replace('"unmerged"', '"merged"'))
    with pytest.raises(ValueError, match="--take-memory"):
        memory_tables.audits_of(file)


def test_an_unfinished_audit_is_not_taken(writer, audited):
    import memory_tables

    header, rows = MEMORY.read(audited / "memory.jsonl")
    MEMORY.write(audited / "memory.jsonl", replace(header, num_passages=2), rows)
    with pytest.raises(SystemExit, match="is unfinished; run its command again"):
        memory_tables.take_memory([audited], audited / "memory.json")
    assert not (audited / "memory.json").exists()


def test_a_place_without_a_table_and_a_table_without_a_place(writer, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- nothing -->\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(writer, "pages", lambda: [page])
    with pytest.raises(SystemExit, match="there is no table 'nothing'"):
        writer.written()
    page.write_text("<!-- audit -->\nold\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"no page has a place for .*benchmarks"):
        writer.written()


def test_the_claims_say_at_which_setting_they_were_measured(writer):
    claims = json.loads(writer.FIGURES.read_text(encoding="utf-8"))["claims"]
    for setting in ("quick", "full"):
        assert f"`linattn reproduce --{setting}`" in writer.claims_words({**claims, "setting": setting}, [])
        assert f"`linattn reproduce --{setting}`" in writer.claims_page({**claims, "setting": setting})


def test_a_row_of_another_machine_says_so(writer):
    lines = [json.loads(line) for line in writer.RESULTS.read_text(encoding="utf-8").splitlines()]
    usual = lines[0]["machine"]
    assert all(set(line["machine"]) == set(usual) for line in lines)
    written = writer.benchmark_table(lines)
    assert len(re.findall(r"(?:holds|\*\*missed\*\*) \|$", written, re.MULTILINE)) == len(lines)
    num_single = sum(line["machine"]["threads"] == 1 for line in lines)
    assert len(re.findall(r"\b1 thread\b", written)) == num_single > 0
    other = {**lines[0], "machine": {**usual, "threads": 1, "processor": "another"}}
    assert "tokens; 1 thread, processor another |" in writer.benchmark_table([*lines[1:], other])


def test_a_benchmark_of_another_setting_says_which(writer):
    """The page's first sentence has the usual heads, width and features; a file that measures others has its words."""
    from benchmark_tables import claims_table
    from benchmark_words import SETTINGS

    lines = [json.loads(line) for line in writer.RESULTS.read_text(encoding="utf-8").splitlines()]
    written = writer.benchmark_table(lines)
    others = []
    for name in {line["benchmark"] for line in lines}:
        text = (writer.RESULTS.parent / f"{name}.py").read_text(encoding="utf-8").partition("from __future__")[0]
        if not re.search(r"8 heads, D = (Dv = )?64\b", text):
            others.append(name)
            assert f"`python benchmarks/{name}.py`: {SETTINGS[name]}\n" in written
            assert SETTINGS[name] in claims_table(lines, name)
    assert len(others) > 10
    assert set(others) == SETTINGS.keys()


def benchmark_row(**fields):
    """A row of benchmarks/results.jsonl."""
    machine = {"torch": "2", "threads": 2, "processor": "a processor", "vectors": "AVX2"}
    return {"benchmark": "a_new_one", "figure": 2.0, "unit": "×", "bound": ">= 1", "holds": True, **fields} | {
        "machine": machine
    }


def test_a_benchmark_s_row_says_which_way_is_better_and_whether_it_is_missed(writer):
    rows = [
        benchmark_row(claim="times faster than another, causal, 10 tokens"),
        benchmark_row(claim="a new figure, 1,000 tokens", figure=1.5003, bound="<= 1.5", holds=False),
        benchmark_row(
            claim="softmax's time over that of merged 128, the whole of MiniLM with 512 positions",
            benchmark="merged_keys_speed_up_a_long_encoder",
            figure={"median": 0.5, "min": 0.4, "max": 0.6},
            bound="<= 1",
        ),
    ]
    written = writer.benchmark_table(rows)
    assert "### A new one\n\n`python benchmarks/a_new_one.py`" in written
    assert "| speed ÷ that of another | causal, 10 tokens | 2 × |  | higher | ≥ 1 | holds |" in written
    assert "| a new figure | 1,000 tokens | 1.5003 × |  | lower | ≤ 1.5 | **missed** |" in written
    assert "| merged 128, 512 tokens | 0.5 × | 0.4 to 0.6 | higher | ≤ 1 | holds |" in written


def test_misses_are_counted_by_benchmark_and_the_farthest_is_shown(writer):
    """Whether lower or higher is better; the benchmarks' page has the rows, at the heading that a link names."""
    rows = [
        benchmark_row(claim="a ratio, 10 tokens", figure=1.8, bound="<= 1.5", holds=False),
        benchmark_row(claim="another ratio, 20 tokens", figure={"median": 2.0, "min": 1, "max": 3}, holds=False)
        | {"bound": ">= 3"},
        benchmark_row(claim="a ratio that holds, 30 tokens"),
        benchmark_row(claim="one more, 40 tokens", benchmark="generation_without_end"),
    ]
    written = writer.misses_table(rows)
    assert written.startswith("2 of 4 figures ")
    (shown,) = written.splitlines()[4:]
    assert shown == "| [A new one](benchmarks.md#a-new-one) | 2 of 3 | another ratio; 20 tokens | 2 × | ≥ 3 |"
    lines = [json.loads(line) for line in writer.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert sum(int(missed) for missed in re.findall(r"\| (\d+) of \d+ \|", writer.misses_table(lines))) == sum(
        not line["holds"] for line in lines
    )


def test_every_benchmark_has_a_heading_and_every_claim_its_words(writer):
    """Of the rows there are; one of a new benchmark is shown by its file's name until it has some."""
    from benchmark_words import HEADINGS, Words, words_of

    lines = [json.loads(line) for line in writer.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert {line["benchmark"] for line in lines} <= HEADINGS.keys()
    named = [words_of(line["claim"], "<= 1") == words_of(line["claim"], ">= 1") for line in lines]
    assert all(named)
    assert words_of("a, b, c", "<= 1") == Words("a", "b, c", "lower")


def test_the_figures_of_claims_are_of_the_experiments_there_are(writer):
    decisions = json.loads(writer.FIGURES.read_text(encoding="utf-8"))["claims"]["decisions"]
    assert [one["name"] for one in decisions] == list(EXPERIMENTS)
    for one in decisions:
        experiment = EXPERIMENTS[one["name"]]
        assert (one["sentence"], one["source"]) == (experiment.CLAIM, experiment.SOURCE)


def test_figures_are_taken_from_a_report(writer, tmp_path, monkeypatch):
    """What is taken of a report's files comes back in the tables."""
    monkeypatch.setattr(writer, "SHOWN", (("Relu", None),))
    versions = {"linattn-compiled": "1.2"}
    header = Header(versions, "m", "M", False, 1, 1, 2, 2, "t", "", 8, 0, 8, ["Relu"], [64], 1, 0)
    head = HeadRow(0, 0, "Relu", 2, 0, None, 0.2, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None, 6, 20)
    models = [ModelRow(name, None, 0, 1.0, 1.0) for name in ("exact", "uniform")]
    AUDIT.write(
        tmp_path / "audit.jsonl",
        header,
        [*models, head, TimeRow("Relu", 2, (3.0,), (2.0,), 1), ModelRow("Relu", 2, 0, 0.9, 0.9)],
    )
    monkeypatch.setattr(reproduction, "EXPERIMENTS", {"first": Trial()})
    run = Reproduction([], "full")
    CLAIMS.write(tmp_path / "claims.jsonl", run.header, run.records([]))
    monkeypatch.setitem(EXPERIMENTS, "first", Trial())
    taken = json.loads(json.dumps(writer.take_figures(tmp_path)))
    assert "| `Relu` | 6 | 20 | 1.5 × | 0.20 | 0.25 | 0.900 |" in writer.audit_table(taken["audit"])
    assert "mean over 1 heads, linattn-compiled 1.2." in writer.audit_table(taken["audit"])
    reason = (Trial.__doc__ or "").partition("\n")[0]
    assert (
        f"| {Trial.CLAIM} | **holds** | {reason}<br>*Measured:* the largest area is 25 | {Trial.SOURCE} | `first` |"
        in writer.claims_page(taken["claims"])
    )
