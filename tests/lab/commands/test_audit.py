"""The command `linattn audit`, from the words of the command line to the files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from linattn import cli
from linattn.lab.audit.measuring import Audit
from linattn.lab.audit.records import read_records
from linattn.lab.commands.app import app

WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@pytest.fixture
def run(folder, prose, tmp_path):
    """A function that runs `linattn audit` on a tiny model with more words."""
    text = tmp_path / "text.txt"
    text.write_text(prose, encoding="utf-8")

    def with_words(*words, family="llama"):
        fixed = [str(folder(family)), "--text", str(text), "--tokens", "32", "--out", str(tmp_path / "out")]
        return CliRunner(env=WIDE).invoke(app, ["audit", *fixed, *words])

    return with_words


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_audit(run, tmp_path, family):
    words = [
        "--map",
        "favorplus",
        "--map",
        "Centred(Taylor(order=1))",
        "--features",
        "16,8",
        "--draws",
        "2",
        "--seed",
        "3",
    ]
    result = run(*words, family=family)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.jsonl", "index.html"]
    header, rows = read_records(tmp_path / "out" / "audit.jsonl")
    assert (header.features, header.draws, header.seed, header.num_tokens) == ([8, 16], 2, 3, 32)
    assert header.maps == ["FavorPlus", "Centred(Taylor(order=1))"]
    heads = 2 * 4
    ranks = 6 if family == "bert" else 5
    assert len(rows) == 2 + ranks * heads + (2 * 2 + 1) * (heads + 1)
    assert "uniform averaging" in result.output
    assert "Up to 80 numbers per head, what 8 random features keep" in result.output
    assert str(tmp_path / "out" / "index.html") in result.output.replace("\n", "")


def test_a_short_text_is_announced(run, tmp_path):
    result = run("--map", "Relu", "--tokens", "100")
    assert "gives only 64 tokens; all of them are read." in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--map", "Performer"], "there is no feature map 'Performer'; write one of Exponential"),
        (["--features", "64;256"], "--features wants whole numbers separated by commas"),
        (["--features", "7", "--map", "Hyperbolic"], "multiple of 2"),
        (["--draws", "0"], "draws must be at least 1"),
        (["--tokens", "5000"], "5000 tokens were asked for"),
        (["--text", "/nowhere/text.txt"], "there is no text file"),
        (["--map", "Centred(Relu)"], "softmax kernel"),
    ],
)
def test_refusals(run, tmp_path, words, message):
    result = run(*words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_what_was_there(run, tmp_path, monkeypatch):
    run("--map", "Relu")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    measure = Audit.rows

    def interrupted(self):
        for number, row in enumerate(measure(self)):
            if number == 5:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(Audit, "rows", interrupted)
    result = run("--map", "FavorPlus")
    assert result.exit_code == 130
    assert "Interrupted. Nothing half-written is left" in result.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_an_interrupt_that_was_swallowed(run, tmp_path, monkeypatch):
    """Python ignores what a signal handler raises inside a destructor or a weak reference's callback."""
    measure = Audit.rows

    def swallowing(self):
        for row in measure(self):
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    monkeypatch.setattr(Audit, "rows", swallowing)
    before = signal.getsignal(signal.SIGINT)
    assert run("--map", "Relu").exit_code == 130
    assert not list((tmp_path / "out").iterdir())
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_the_page_is_written(run, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("linattn.lab.commands.audit.write_report", interrupted)
    assert run("--map", "Relu").exit_code == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["audit.jsonl"]
    read_records(tmp_path / "out" / "audit.jsonl")


def test_a_real_interrupt(folder, prose, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(prose, encoding="utf-8")
    words = ["audit", str(folder("bert")), "--text", str(text), "--tokens", "32", "--draws", "5000", "--out", str(out)]
    command = [sys.executable, "-c", "from linattn.cli import main; main()", *words]
    # One thread: tiny matrices gain nothing from more.
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone) as process:
        try:
            deadline = time.monotonic() + 120
            while not list(out.glob(".audit.jsonl.*.part")):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Interrupted. Nothing half-written is left" in output
    assert not list(out.iterdir())


def test_missing_extras_are_named(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("typer", "plotly") else object())
    with pytest.raises(
        SystemExit, match=r"needs typer, plotly, not installed here: pip install 'linattn\[convert,lab\]'"
    ):
        cli.main()


def test_help(monkeypatch):
    result = CliRunner(env=WIDE).invoke(app, ["audit", "--help"])
    assert result.exit_code == 0
    for option in ("--text", "--map", "--features", "--tokens", "--draws", "--seed", "--out"):
        assert option in result.output
