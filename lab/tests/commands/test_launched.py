"""The commands under torchrun: what a killed rank leaves, and that one process goes on from it as if alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from apart import dying, launch, saying
from linattn.cli.app import app
from linattn.records.files import LOCK
from linattn_lab.audit.records import AUDIT, LengthsRow, TimeRow

pytestmark = pytest.mark.xdist_group("ranks")
SECONDS = 60


def check_cause(said: str) -> None:
    """The launcher names the killed rank."""
    assert "Root Cause" in said, said
    cause = said[said.index("Root Cause") :]
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause


@pytest.fixture
def killed(tmp_path):
    """A function that runs the command on two ranks until the second is killed at a call: what was printed."""
    folder = tmp_path / "printed"

    def at(place: str, name: str, times: int, *words: object) -> str:
        folder.mkdir()
        check_cause(launch(folder, words, dying, (place, name, times), SECONDS))
        assert not (folder / "1").read_text()
        return (folder / "0").read_text()

    return at


@pytest.fixture
def texts(tmp_path) -> list[str]:
    """A training of a few seconds, on texts of two lines."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(f"{count} bottles of beer {number}" for count in range(40)))
    sizes = "--steps 40 --context 32 --batch 2 --layers 2 --width 16 --heads 2 --features 4 --pattern ls"
    return ["--text", str(folder), *sizes.split()]


def best(folder: Path) -> float:
    """The validation loss of the kept weights."""
    return json.loads((folder / "training.json").read_text())["trained"]["best_loss"]


def run(*words: object) -> str:
    """What the command prints in this process."""
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def checkpoints(work: Path, training: str) -> list[int]:
    """The steps of a training's checkpoints; nothing else is there."""
    names = sorted(path.name for path in (work / "checkpoints" / training).iterdir() if not path.name.startswith("."))
    return [int(name.removeprefix("step-")) for name in names]


def test_training_goes_on_in_one_process(tmp_path, texts, killed):
    out, work = tmp_path / "split", tmp_path / "split.unfinished"
    # At the third look, of which there is one every four steps.
    killed("linattn.training.loop:_Run", "_look", 3, "train", out, *texts, "--parts", 2, "--shard")
    assert not out.exists()
    assert checkpoints(work, "training") == [4, 8]
    # One process, told neither of parts nor of sharded weights, goes on to the loss of one that was never interrupted.
    run("train", out, *texts)
    run("train", tmp_path / "alone", *texts)
    assert not work.exists() or not list(work.glob("checkpoints"))
    assert best(out) == pytest.approx(best(tmp_path / "alone"), rel=1e-3)


def test_a_conversion_goes_on_in_one_process(tmp_path, bert, words_of, killed):
    text, out, work = tmp_path / "text.txt", tmp_path / "out", tmp_path / "out.unfinished"
    text.write_text("\n\n".join(words_of(6) for _ in range(200)))
    options = ["--text", text, "--tokens", 16, "--map", "Expansion(num_centres=2)", "--minutes", 0.02]
    # The first look is after a twentieth of the time; however slow the machine is, there is one more at its end.
    printed = killed("linattn.training.loop:_Run", "_look", 2, "convert", bert, out, *options)
    # The first process alone prints.
    assert printed.count("Measuring and calibrating") == 1
    assert not out.exists()
    (last,) = checkpoints(work, "distillation")
    run("convert", bert, out, *options)
    report = json.loads((out / "conversion.json").read_text())
    (training,) = report["trainings"]
    assert training["steps"] > last
    assert [stage["name"] for stage in report["stages"]] == ["uniform", "unconverted", "calibrated", "converted"]


def test_an_audit_goes_on_in_one_process(tmp_path, bert, words_of, killed):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(words_of(64))
    options = ["--text", text, "--tokens", 32, "--features", 8, "--draws", 2, "--map", "FavorPlus", "--map", "Relu"]
    # Of each pair of layers the second rank has one: killed in FavorPlus's second draw.
    printed = killed("linattn_lab.audit.truth:LayerTruth", "measure", 2, "audit", bert, *options, "--out", out)
    assert printed.count("Loading") == 1
    # A rank that is ended by a signal leaves its lock's file, which holds nobody up.
    assert {path.name for path in out.iterdir()} - {LOCK} == {"audit.jsonl"}
    _, kept = AUDIT.so_far(out / "audit.jsonl")
    assert any(getattr(row, "map", "") == "FavorPlus" for row in kept)
    assert "figures were measured before and are kept" in run("audit", bert, *options, "--out", out)
    run("audit", bert, *options, "--out", tmp_path / "alone")
    found, alone = (set(AUDIT.read(folder / "audit.jsonl")[1]) for folder in (out, tmp_path / "alone"))
    times = TimeRow, LengthsRow
    assert {row for row in found if not isinstance(row, times)} == {row for row in alone if not isinstance(row, times)}


@pytest.fixture
def words_of():
    """A function that gives so many words that the tokenizer knows."""
    draw = random.Random(0)
    return lambda count: " ".join(f"w{draw.randrange(40)}" for _ in range(count))


@pytest.fixture
def bert(folder) -> Path:
    """A tiny encoder's folder."""
    return folder("bert")


@pytest.mark.parametrize(
    ("command", "words", "option"),
    [
        ("train", ("--seed", "7"), "--seed (process 0 has 0, process 1 has 7)"),
        ("convert", ("--map", "Taylor"), "--map (process 0 has None, process 1 has Taylor)"),
        ("audit", ("--budget", "64"), "--budget (process 0 has None, process 1 has 64)"),
    ],
)
def test_processes_that_were_started_differently_are_refused_on_all(
    tmp_path: Path, command: str, words: tuple[str, ...], option: str
) -> None:
    """Before anything is loaded, measured or written."""
    folder, out = tmp_path / "printed", tmp_path / "out"
    folder.mkdir()
    given = {"train": [out], "convert": ["packaged", out], "audit": ["--out", out]}[command]
    launch(folder, [command, *given], saying, words, SECONDS)
    for rank, who in enumerate((command, f"{command}, process 1")):
        said = (folder / str(rank)).read_text()
        assert f"linattn {who}: every process must be started with the same command, got different ones" in said, said
        assert option in said
    assert not out.exists()
    assert not out.with_name("out.unfinished").exists()
