"""The command `linattn bench`, from the words of the command line to the files."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from elsewhere import locked_elsewhere
from linattn.cli.app import app
from linattn_lab.bench import measuring
from linattn_lab.bench.records import BENCH

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
TINY = ["--lengths", "24,8,16", "--heads", "2", "--head-dim", "8", "--repeats", "2", "--no-memory"]


@pytest.fixture
def run(tmp_path):
    """A function that runs `linattn bench` on tiny shapes with more words."""

    def with_words(*words):
        return CliRunner(env=WIDE).invoke(app, ["bench", *TINY, "--out", str(tmp_path / "out"), *words])

    return with_words


@pytest.fixture
def timed(monkeypatch):
    """The lengths timed; a number put into `ends` makes that length end in an interrupt."""
    seconds = measuring.seconds

    class Lengths(list):
        ends = None

    lengths = Lengths()

    def counted(runs, *, repeats):
        length = runs["linear"]()[0].shape[2]
        if length == lengths.ends:
            raise KeyboardInterrupt
        lengths.append(length)
        return seconds(runs, repeats=repeats)

    monkeypatch.setattr(measuring, "seconds", counted)
    return lengths


def files(folder):
    """The names in a folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("words", "features"),
    [
        (["--features", "16", "--causal", "--backward", "--seed", "3"], 16),
        (["--map", "centred(Taylor(order=1))", "--dtype", "bfloat16", "--batch", "2"], 9),
        (["--map", "Oprf"], 256),
        (["--map", "merged 8 + window 4", "--causal"], 0),
    ],
)
def test_bench(run, tmp_path, words, features):
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert files(tmp_path / "out") == ["bench.jsonl", "index.html", "report.json"]
    header, rows = BENCH.read(tmp_path / "out" / "bench.jsonl")
    assert header.lengths == [row.length for row in rows] == [8, 16, 24]
    assert (header.num_features, header.repeats, header.num_heads, header.head_dim) == (features, 2, 2, 8)
    assert (header.is_causal, header.backward) == ("--causal" in words, "--backward" in words)
    for wanted in ("Crossover.", "Growth.", "Verified.", "Error.", "not measured, as asked for", "uniform attention"):
        assert wanted in result.output
    assert str(tmp_path / "out" / "index.html") in result.output.replace("\n", "")


def test_an_interrupted_run_goes_on_where_it_was(run, tmp_path, timed):
    timed.ends = 24
    result = run()
    assert result.exit_code == 130
    assert "Interrupted. 2 of 3 lengths are kept" in result.output
    (left,) = (tmp_path / "out").iterdir()
    assert left.name.startswith("bench.partial-")
    _, kept = BENCH.unfinished(left)
    assert timed == [8, 16]
    timed.clear()
    timed.ends = None
    result = run()
    assert result.exit_code == 0, result.output
    assert "Measured before the interrupt, and kept: 8, 16 tokens." in result.output
    assert timed == [24]
    assert files(tmp_path / "out") == ["bench.jsonl", "index.html", "report.json"]
    _, rows = BENCH.read(tmp_path / "out" / "bench.jsonl")
    assert rows[:2] == kept
    timed.clear()
    assert run().exit_code == 0
    assert timed == [8, 16, 24]


def test_other_settings_between_lose_nothing_of_an_interrupted_run(run, tmp_path, timed):
    timed.ends = 24
    run()
    timed.clear()
    timed.ends = None
    assert run("--seed", "1").exit_code == 0
    assert timed == [8, 16, 24]
    timed.clear()
    result = run()
    assert "Measured before the interrupt, and kept: 8, 16 tokens." in result.output
    assert timed == [24]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'{"a": 1}\n'], ids=["no text", "no benchmark"])
def test_a_file_of_another_is_not_lost(run, tmp_path, timed, content):
    out = tmp_path / "out"
    out.mkdir()
    (out / "bench.jsonl").write_bytes(content)
    for _ in range(2):
        assert run().exit_code == 0
    assert (out / "bench.1.jsonl").read_bytes() == content
    # Of the same settings the last run's is kept.
    assert not (out / "bench.2.jsonl").exists()


def test_a_finished_benchmark_of_other_settings_is_not_lost(run, tmp_path, timed):
    run()
    before = (tmp_path / "out" / "bench.jsonl").read_bytes()
    result = run("--seed", "1")
    assert "bench.1.jsonl: it is of other settings" in result.output.replace("\n", "")
    assert (tmp_path / "out" / "bench.1.jsonl").read_bytes() == before


def test_a_folder_in_use_is_refused_before_anything_is_measured(run, tmp_path, timed):
    with locked_elsewhere(tmp_path / "out"):
        result = run()
    assert (result.exit_code, timed) == (1, [])
    assert "is in use by another process; wait until that has ended, or take another folder" in result.stderr


def test_an_early_interrupt_leaves_what_was_there(run, tmp_path, timed):
    run()
    before = (tmp_path / "out" / "bench.jsonl").read_bytes()
    timed.ends = 8
    result = run("--seed", "1")
    assert result.exit_code == 130
    assert "No length was measured yet." in result.output
    assert (tmp_path / "out" / "bench.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "16;32"], "whole numbers separated by commas, as in 512,1024,2048; got '16;32'"),
        (["--lengths", "16,-32"], "wanted different positive whole numbers"),
        (["--dtype", "float8"], "'float8' is not one of 'float32', 'bfloat16', 'float16'"),
        (
            ["--map", "Relu", "--features", "64"],
            "Relu has a width of its own, got features=64; leave the features out",
        ),
        (["--map", "Hyperbolic", "--features", "7"], "multiple of 2"),
        (["--map", "Centred(Relu)"], "softmax kernel"),
        (["--map", "merged 8", "--causal"], "give window too"),
        (["--map", "merged 8", "--features", "64"], "merged 8 has a width of its own, got features=64"),
        (["--map", "Relu + window 4"], "Relu cannot share a normaliser with exact attention"),
        (["--map", "window 4"], "'window 4' merges no keys; write, for example, window 4 + merged 128"),
        (["--map", "FavorPlus + merged 4"], "leave the map out, as in 'window 32 + merged 128', or the merged keys"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
        (["--device", "cuda"], "torch finds no CUDA device here"),
    ],
)
def test_refusals(run, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*words)
    # What is wrong whatever torch says of it is a usage error.
    assert (result.exit_code, "linattn bench: " in result.stderr) in ((1, True), (2, False))
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_help():
    result = CliRunner(env=WIDE).invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    for option in ("--lengths", "--map", "--features", "--dtype", "--device", "--causal", "--backward", "--no-memory"):
        assert option in result.output
