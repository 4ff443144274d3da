"""The command `linattn report`: the page anew, opened, or its figures."""

from __future__ import annotations

import json
import webbrowser

import pytest
from typer.testing import CliRunner

from linattn.cli.app import app
from linattn_lab.report import report_schema

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
BENCH = "bench --lengths 8 --features 8 --heads 1 --head-dim 4 --repeats 1 --no-memory --out"


@pytest.fixture
def run():
    """A function that runs `linattn report` with more words."""
    return lambda *words: CliRunner(env=WIDE).invoke(app, ["report", *map(str, words)])


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with a benchmark."""
    folder = tmp_path_factory.mktemp("out")
    assert CliRunner(env=WIDE).invoke(app, [*BENCH.split(), str(folder)]).exit_code == 0
    return folder


@pytest.fixture
def opened(monkeypatch):
    """The addresses that a browser was asked for, and whether there is one."""
    found = []
    monkeypatch.setattr(webbrowser, "open", lambda address: found.append(address) or found[0] != "none")
    return found


def test_the_page_and_its_figures_are_written_anew(run, out, opened):
    for name in ("index.html", "report.json"):
        (out / name).unlink()
    result = run(out)
    assert (result.exit_code, opened) == (0, [])
    assert f"Written: {out / 'index.html'} and {out / 'report.json'}" in result.output
    assert "FavorPlus" in (out / "index.html").read_text(encoding="utf-8")
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["bench"]["header"]["map"] == "FavorPlus"


def test_the_page_is_opened(run, out, opened, monkeypatch):
    monkeypatch.chdir(out.parent)
    assert run(out.name, "--open").exit_code == 0
    assert opened == [(out / "index.html").as_uri()]


def test_no_browser(run, out, opened):
    opened.append("none")
    result = run(out, "--open")
    assert result.exit_code == 1
    assert (
        result.stderr == f"linattn report: no browser was found here to open the page; open {out}/index.html in one\n"
    )
    assert "Written: " in result.stdout


def test_figures_on_the_standard_output(run, out):
    result = run(out, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert "Written: " in result.stderr


def test_the_schema_needs_no_folder(run, tmp_path):
    result = run(tmp_path / "none", "--schema")
    assert (result.exit_code, json.loads(result.stdout)) == (0, report_schema())


def test_a_folder_without_figures(run, tmp_path):
    result = run(tmp_path, "--open")
    assert result.exit_code == 1
    assert "holds none of audit.jsonl, memory.jsonl, claims.jsonl, bench.jsonl" in result.stderr
    assert list(tmp_path.iterdir()) == []
