"""The command `linattn train`, from the words of the command line to the folder."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from apart import Apart, dying
from linattn.cli.app import app
from linattn.hf import LinearLMForCausalLM
from linattn_lab.pretraining import from_documents, read_documents
from linattn_lab.pretraining.scoring import score, windows

# The folder is trained once, and commands are forked from the server of the ranks.
pytestmark = pytest.mark.xdist_group("ranks")

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
SMALL = ["--layers", "2", "--width", "16", "--heads", "2", "--features", "8", "--context", "32", "--steps", "40"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of 100 files."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(100):
        (folder / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, " * 3, encoding="utf-8")
    return folder


def run(*words):
    return CliRunner(env=WIDE).invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """A folder that the command has written, and what it printed."""
    out = tmp_path_factory.mktemp("models") / "out"
    result = run("train", out, "--text", texts, *SMALL, "--seed", "3", "--learning-rate", "1e-2")
    assert result.exit_code == 0, result.output
    return out, result.output


def test_from_the_words_to_the_folder(trained, texts):
    out, printed = trained
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "training.json", "README.md", "logs"} <= names
    curves = EventAccumulator(str(out / "logs" / "training")).Reload()
    assert [event.step for event in curves.Scalars("loss")] == list(range(1, 41))
    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert (report["config"]["steps"], report["config"]["seed"], report["trained"]["steps"]) == (40, 3, 40)
    # What the folder holds is what the report is about.
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    corpus = from_documents(read_documents([texts])[0], context=32)
    found = score(model, windows(corpus.test, 32, report["test"]["num_bytes"]))
    assert found.bits == pytest.approx(report["test"]["bits"], rel=1e-6)
    for place in (printed, (out / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"guessing among 256\W+8.000\W+frequencies of bytes\W+{report['frequency_bits']:.3f}", place)
        assert f"{found.bits:.3f} ± {found.standard_error:.3f}" in place
    assert re.search(r"training: \d+% done, \d\.\d{3} bits per byte, best on validation texts \d", printed)
    assert "bytes/s" in printed


def test_options_reach_the_model(texts, tmp_path):
    options = ["--pattern", "ls", "--map", "LearnedExponential + window 4", "--positions", "none", "--gate", "RetNet"]
    more = ["--hidden", "24", "--dropout", "0.1", "--redraw", "3", "--batch", "2", "--gated", "ls"]
    result = run("train", tmp_path / "out", "--text", texts, *SMALL, *options, *more)
    # A learned map is never redrawn.
    assert result.exit_code == 1
    assert "has no map that is drawn" in result.stderr
    result = run("train", tmp_path / "out", "--text", texts, *SMALL, *options, *more[:4], *more[6:])
    assert result.exit_code == 0, result.output
    config = LinearLMForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.pattern, config.method, config.positions) == ("ls", "LearnedExponential + window 4", None)
    assert (config.gate, config.intermediate_size, config.dropout, config.num_features) == ("RetNet", 24, 0.1, 8)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "1 × `LearnedExponential + window 4 with 8 features` and 1 × softmax" in card
    assert "40 steps of 2 × 32 bytes" in card


def test_killed_three_times_it_is_one_that_was_not(trained, texts, tmp_path):
    """Bit by bit: each process has one thread."""
    out = tmp_path / "out"
    words = ["train", out, "--text", texts, *SMALL, "--seed", "3", "--learning-rate", "1e-2"]
    for times in (3, 4, 2):
        death = ("linattn.training.loop:_Run", "_save", times)
        with Apart(tmp_path / "printed", *words, prepare=dying, arguments=death) as command:
            assert command.ended()[0] == -9
        assert not out.exists()
        assert (tmp_path / "out.unfinished").is_dir()
    (tmp_path / "printed").unlink()
    assert run(*words).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, trained[0]))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    reports = [json.loads((folder / "training.json").read_text(encoding="utf-8")) for folder in (out, trained[0])]
    assert reports[0]["test"] == reports[1]["test"]


@pytest.mark.parametrize(
    ("words", "gate"),
    [([], "ForgetGate"), (["--pattern", "s"], None), (["--gate", "none"], None), (["--gate", "Alibi"], "Alibi")],
)
def test_linear_blocks_have_a_forget_gate_unless_another_is_said(texts, tmp_path, words, gate):
    assert run("train", tmp_path / "out", "--text", texts, *SMALL[:-1], "1", *words).exit_code == 0
    config = LinearLMForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.method, config.gate) == ("LearnedExponential", gate)


def test_refusals(texts, tmp_path, trained):
    out = tmp_path / "out"
    for words, message in (
        (["--map", "Nothing"], "Nothing"),
        (["--context", "100000"], "give more text, or a shorter context"),
        (["--text", tmp_path / "nowhere"], "there is no file or folder"),
        (["--pattern", "x"], 'pattern must be letters "l" (linear) and "s" (softmax), got'),
        (["--minutes", "-1"], "--minutes must be a finite number > 0"),
        (["--resume"], "holds no checkpoint to continue from; train into a new folder"),
    ):
        result = run("train", out, "--text", texts, *SMALL, *words)
        assert result.exit_code == 1
        assert message in result.stderr
        assert not list(tmp_path.iterdir())
    result = run("train", "/", "--text", texts, *SMALL)
    assert "/ cannot be a new folder; give one in it" in result.stderr
    result = run("train", trained[0], "--text", texts, *SMALL)
    assert "exists and is not an empty folder" in result.stderr


def test_a_finished_training_is_continued(texts, tmp_path, monkeypatch):
    """Its last checkpoint is gone on from, through a kill, and the longer training takes the folder's place."""
    out = tmp_path / "out"
    words = ["train", out, "--text", texts, *SMALL[:-1]]
    assert run(*words, "20").exit_code == 0
    first = json.loads((out / "training.json").read_text(encoding="utf-8"))
    for more, message in (
        (["20", "--resume"], "has 20 steps in"),
        (["40", "--resume", "--seed", "5"], "holds an unfinished training with other settings (model: "),
        (["40"], "exists and is not an empty folder"),
    ):
        result = run(*words, *more)
        assert (result.exit_code, message in result.stderr) == (1, True), result.output
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    death = ("linattn.training.loop:_Run", "_save", 3)
    with Apart(tmp_path / "printed", *words, "40", "--resume", prepare=dying, arguments=death) as command:
        assert command.ended()[0] == -9
    (tmp_path / "printed").unlink()
    assert json.loads((out / "training.json").read_text(encoding="utf-8")) == first
    (out / "evaluation.txt").write_text("hours of work")
    with monkeypatch.context() as inside:
        inside.chdir(out)
        result = run(*words, "40", "--resume")
    assert "is a mount point or holds the working directory" in result.stderr
    result = run(*words, "40", "--resume")
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "evaluation.txt").read_text() == "hours of work"
    second = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert second["trained"]["steps"] == 40
    assert second["trained"]["first_loss"] == first["trained"]["first_loss"]
    curves = EventAccumulator(str(out / "logs" / "training")).Reload()
    assert [event.step for event in curves.Scalars("loss")] == list(range(1, 41))


def test_one_file_is_split_by_position_and_what_is_no_text_is_counted(tmp_path):
    (tmp_path / "in" / ".git").mkdir(parents=True)
    (tmp_path / "in" / ".git" / "head").write_bytes(b"x")
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "in" / "text.txt").write_text("".join(f"{number} bottles of beer, " for number in range(999)))
    result = run("train", tmp_path / "out", "--text", tmp_path / "in", *SMALL)
    assert result.exit_code == 0, result.output
    assert "1 files are read, split by position: the last two sixteenths of each are not trained on" in result.output
    assert "1 left out: hidden; 1 left out: no text in UTF-8" in result.output.replace("\n", " ")
    assert "of the last sixteenth of each document" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
