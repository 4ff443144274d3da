"""The command `linattn reproduce`, from the words of the command line to the files."""

from __future__ import annotations

from collections import Counter

import pytest
from typer.testing import CliRunner

from apart import Apart
from elsewhere import locked_elsewhere
from linattn.cli.app import app
from linattn_lab.commands import claims as reproduce_command
from linattn_lab.experiments import EXPERIMENTS, reproduction
from linattn_lab.experiments.experiment import FigureRow
from linattn_lab.experiments.records import CLAIMS, Decision
from pages import Page
from trials import Trial, slow_trials

WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@pytest.fixture
def trials(monkeypatch):
    """Two experiments in the place of the real ones."""
    found = {"first": Trial(), "second": Trial(status="fails")}
    monkeypatch.setattr(reproduction, "EXPERIMENTS", found)
    monkeypatch.setattr(reproduce_command, "EXPERIMENTS", found)
    return found


@pytest.fixture
def run(tmp_path, trials):
    """A function that runs `linattn reproduce` with more words."""

    def with_words(*words):
        return CliRunner(env=WIDE).invoke(app, ["reproduce", "--out", str(tmp_path / "out"), *words])

    return with_words


@pytest.fixture
def kept(tmp_path):
    """A function that reads what is in claims.jsonl, and checks that nothing is there twice."""

    def read():
        header, records = CLAIMS.read(tmp_path / "out" / "claims.jsonl")
        keys = Counter((one.claim, one.series, one.x) if isinstance(one, FigureRow) else one.claim for one in records)
        assert set(keys.values()) <= {1}
        return header, records

    return read


def files(folder):
    """The names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_a_run(run, kept, tmp_path, trials):
    result = run()
    assert result.exit_code == 0, result.output
    header, records = kept()
    assert header.setting == "quick"
    assert [record.status for record in records if isinstance(record, Decision)] == ["holds", "fails"]
    assert files(tmp_path / "out") == ["claims.jsonl", "index.html", "report.json"]
    assert "the largest area is 9" in result.output
    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "linattn reproduce second --again" in page.text
    assert page.figure("chart-first")["curves"][0]["y"] == [1, 4, 9]


def test_a_folder_in_use_is_refused_before_anything_is_measured(run, tmp_path):
    with locked_elsewhere(tmp_path / "out"):
        result = run()
    assert result.exit_code == 1
    assert "is in use by another process; wait until that has ended, or take another folder" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_list_measures_nothing(run, trials, tmp_path):
    result = run("--list")
    assert result.exit_code == 0
    assert "first" in result.output
    assert Trial.SOURCE in result.output
    assert not (tmp_path / "out").exists()
    assert trials["first"].taken == []


def test_the_real_list():
    result = CliRunner(env=WIDE).invoke(app, ["reproduce", "--list"])
    assert result.exit_code == 0
    assert all(name in result.output for name in EXPERIMENTS)


def test_an_interrupted_run_goes_on(run, kept, trials):
    trials["first"].raises[3] = KeyboardInterrupt()
    result = run()
    assert result.exit_code == 130
    assert "All figures so far are in" in result.output
    assert len(kept()[1]) == 2
    del trials["first"].raises[3]
    result = run()
    assert result.exit_code == 0
    assert "2 figures were measured before and are kept." in result.output
    assert trials["first"].taken == [1, 2, 3]
    assert len(kept()[1]) == 10


def test_claims_chosen_one_after_the_other_share_a_file(run, kept, trials):
    assert run("second").exit_code == 0
    assert run("first").exit_code == 0
    assert {record.claim for record in kept()[1]} == {"first", "second"}
    assert trials["second"].taken == [1, 2, 3]


def test_another_setting_starts_anew_and_loses_nothing(run, kept, tmp_path):
    run()
    before = (tmp_path / "out" / "claims.jsonl").read_text()
    result = run("--full")
    assert "another setting" in result.output.replace("\n", " ")
    assert kept()[0].setting == "full"
    assert (tmp_path / "out" / "claims.1.jsonl").read_text() == before
    run()
    assert files(tmp_path / "out") == ["claims.1.jsonl", "claims.2.jsonl", "claims.jsonl", "index.html", "report.json"]


def test_again_measures_anew_what_was_chosen(run, kept, trials, tmp_path):
    run()
    assert run("first", "--again").exit_code == 0
    assert trials["first"].taken == [1, 2, 3, 1, 2, 3]
    assert trials["second"].taken == [1, 2, 3]
    assert len(kept()[1]) == 10
    assert len(CLAIMS.read(tmp_path / "out" / "claims.1.jsonl")[1]) == 10


def test_a_damaged_file_is_kept_aside(run, kept, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "claims.jsonl").write_text("something else\n")
    assert run().exit_code == 0
    assert (tmp_path / "out" / "claims.1.jsonl").read_text() == "something else\n"
    assert len(kept()[1]) == 10


def test_undecided_ends_with_one(run, trials):
    trials["second"].status = "undecided"
    result = run()
    assert result.exit_code == 1
    assert "Could not decide: second." in result.output


def test_a_crash_ends_with_one_and_shows_where(run, kept, trials):
    trials["first"].raises[2] = ArithmeticError("no square of two")
    result = run()
    assert result.exit_code == 1
    assert "first crashed" in result.output
    assert "no square of two" in result.output
    assert [record.claim for record in kept()[1] if isinstance(record, Decision)] == ["second"]


def test_a_claim_that_does_not_exist(run):
    result = run("third")
    assert result.exit_code == 1
    assert "no claim is called third" in result.output


# Beside the ranks, whose server is forked from.
@pytest.mark.xdist_group("ranks")
def test_a_run_that_is_killed_goes_on(kept, tmp_path):
    words, file = ["reproduce", "--full", "--out", tmp_path / "out"], tmp_path / "out" / "claims.jsonl"
    for figures in (1, 4, 8):
        with Apart(tmp_path / "printed", *words, prepare=slow_trials) as process:
            process.wait_for(lambda many=figures: file.exists() and len(file.read_text().splitlines()) > many)
        with file.open("a") as cut:
            cut.write('{"kind": "figure", "cla')
    with Apart(tmp_path / "printed", *words, prepare=slow_trials) as process:
        status, printed = process.ended()
    assert status == 0, printed
    records = kept()[1]
    assert [record.status for record in records if isinstance(record, Decision)] == ["holds", "fails"]
    assert len(records) == 14
    # No start found the file of the one before unreadable and began anew.
    assert files(tmp_path / "out") == ["claims.jsonl", "index.html", "report.json"]
