"""The command `linattn convert`, from the words of the command line to the folder."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

from apart import Apart, dying
from converted import agreement
from linattn.cli.app import app
from linattn.convert.running import run as run_model
from linattn.convert.samples import from_texts
from linattn.convert.stages import measure
from linattn.hf import from_pretrained
from linattn.hf.layer_attention import LayerAttention

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
LEARNED = "LearnedExponential(num_features=8)"
STAGES = ["uniform", "unconverted", "calibrated", "converted"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of 200 paragraphs in the words that the tiny tokenizers know."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("text") / "text.txt"
    paragraphs = (" ".join(f"w{draw.randrange(40)}" for _ in range(draw.randint(3, 9))) for _ in range(200))
    file.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return file


@pytest.fixture
def words(folder, text, tmp_path):
    """A function that gives the words of the command line for a tiny model."""

    def of(*more, family="bert"):
        return ["convert", str(folder(family)), str(tmp_path / "out"), "--text", str(text), "--tokens", "16", *more]

    return of


@pytest.fixture
def run(words, monkeypatch):
    """A function that runs the command, on a clock of which every look takes half a second."""
    clock = count(0.0, 0.5)
    monkeypatch.setattr("linattn.training.loop.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    return lambda *more, **options: CliRunner(env=WIDE).invoke(app, words(*more, **options))


def report_of(out):
    """conversion.json, which is JSON to the letter."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((out / "conversion.json").read_text(encoding="utf-8"), parse_constant=refuse)


class Favouring:
    """Measures a model as ever, and says of one stage that it is the best."""

    def __init__(self, name):
        self.name = name

    def __call__(self, name, *args):
        found = measure(name, *args)
        cosine = 0.9918 if name == self.name else 0.9884
        return replace(found, agreement=replace(found.agreement, embedding_cosine=cosine))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_from_the_words_to_the_folder(run, folder, text, tmp_path, family):
    result = run("--map", LEARNED, "--minutes", "0.2", "--seed", "4", family=family)
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    names = {path.name for path in out.iterdir()}
    assert {"linattn.json", "linattn.safetensors", "model.safetensors", "conversion.json", "README.md"} < names
    assert {"logs", "tokenizer.json"} < names
    assert not {name for name in names if name.startswith(".")}
    for training in ("transfer", "distillation"):
        assert EventAccumulator(str(out / "logs" / training)).Reload().Scalars("loss")
    report = report_of(out)
    assert [stage["name"] for stage in report["stages"]] == STAGES
    # What the folder holds is what the report is about.
    tokenizer = AutoTokenizer.from_pretrained(out)
    content = text.read_text(encoding="utf-8")
    samples = from_texts(tokenizer, [content], num_tokens=16, batch_size=2, seed=4)
    assert len(samples.held_out) == report["num_held_out"]
    teacher, student = AutoModel.from_pretrained(folder(family)).eval(), from_pretrained(out)
    with torch.no_grad():
        exact, ours = ([run_model(one, batch) for batch in samples.held_out] for one in (teacher, student))
    found = {stage["name"]: stage["agreement"] for stage in report["stages"]}[report["kept"]]
    for name, value in vars(agreement(ours, exact)).items():
        assert found[name] == pytest.approx(value, abs=1e-6)


def test_the_table_shows_the_reports_figures(run, tmp_path):
    result = run("--map", LEARNED, "--minutes", "0.2")
    report, card = report_of(tmp_path / "out"), (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    labels = ["uniform attention", "the map as drawn", "calibrated", "distilled"]
    for stage, label in zip(report["stages"], labels, strict=True):
        found = stage["agreement"]
        figures = [f"{found[name]:.4f}" for name in ("embedding_cosine", "token_cosine", "rank_correlation")]
        assert re.search(rf"^ *{label} +{' +'.join(figures)}", result.output, re.MULTILINE)
        assert f"| {label} | {' | '.join(figures)} |" in card
    for number, layer in enumerate(report["stages"][-1]["layers"]):
        errors = [f"{stage['layers'][number]['error']:.4f}" for stage in report["stages"][1:]]
        figures = [f"{layer['uniform_error']:.4f}", *errors, f"{layer['worst']:.4f}"]
        assert re.search(rf"^ *{re.escape(layer['layer'])} +{' +'.join(figures)}", result.output, re.MULTILINE)
        assert f"| {layer['layer']} | {' | '.join(figures)} |" in card
    assert f"{report['num_held_out']} held-out texts, {report['num_held_out_tokens']:,} tokens" in result.output
    assert f"Written: {tmp_path / 'out'}" in result.output.replace("\n", "")


def test_without_time(run, tmp_path):
    assert run("--map", "Expansion(num_centres=2)", "--minutes", "0").exit_code == 0
    report = report_of(tmp_path / "out")
    assert [stage["name"] for stage in report["stages"]] == STAGES[:3]
    assert report["trainings"] == []
    assert not (tmp_path / "out" / "logs").exists()


def test_maps_alone(run, folder, tmp_path):
    assert run("--map", "LearnedExponential", "--features", "4", "--minutes", "0.2", "--no-distil").exit_code == 0
    report = report_of(tmp_path / "out")
    assert [stage["name"] for stage in report["stages"]] == STAGES[:3]
    assert [training["name"] for training in report["trainings"]] == ["transfer"]
    plain, trained = AutoModel.from_pretrained(folder("bert")), from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in plain.state_dict().items())
    kernels = [part for part in from_pretrained(tmp_path / "out").modules() if isinstance(part, LayerAttention)]
    assert [kernel.feature_map.num_features for kernel in kernels] == [4, 4]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "/nowhere/text.txt"], "there is no text file /nowhere/text.txt"),
        (["--map", "Performer"], "--map: 'Performer': there is no feature map 'Performer'"),
        (["--map", "window 4 + merged 8"], "--map must be a map, as LearnedExponential, got 'window 4 + merged 8'"),
        (["--map", "Taylor(order=1) + window 3"], "the window must be a power of two"),
        (["--map", "Taylor(order=1) + window 4"], "cannot share a normaliser"),
        (["--minutes", "inf"], "--minutes must be a finite number >= 0"),
        (["--tokens", "5000"], "--tokens is 5000, and BertModel takes at most 512"),
        (["--tokens", "500"], "wanted 16 or more"),
        (["--tokens", "4"], "which leaves 4 tokens for a text"),
        (["--map", "FavorPlus"], "linattn convert: --features is None, and FavorPlus needs a number of features"),
    ],
)
def test_refusals_leave_nothing(run, tmp_path, more, message):
    result = run(*more)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_refused_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn.cli.conversion.load", None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    result = run()
    assert result.exit_code == 1
    assert "exists and is not an empty folder; give a new folder, or remove it first" in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_an_empty_folder_by_another_name(folder, text, tmp_path, monkeypatch):
    out = tmp_path / "here"
    out.mkdir()
    monkeypatch.chdir(tmp_path)
    more = ["--text", str(text), "--tokens", "16", "--map", "Taylor(order=1)", "--minutes", "0"]
    result = CliRunner(env=WIDE).invoke(app, ["convert", str(folder("bert")), "./here/../here/", *more])
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert report_of(out)["method"] == "Taylor(order=1)"


@pytest.mark.parametrize("is_mount", [False, True])
def test_a_folder_that_cannot_be_replaced_is_refused_before_any_work(run, tmp_path, monkeypatch, is_mount):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("linattn.cli.conversion.load", None)
    if is_mount:
        monkeypatch.setattr(type(out), "is_mount", lambda folder: folder == out)
    else:
        monkeypatch.chdir(out)
    result = run()
    assert result.exit_code == 1
    assert "is a mount point or holds the working directory; give a new folder in it" in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_another_conversion_is_not_gone_on_with(run, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("linattn.cli.conversion.model_card", broken)
    result = run("--map", LEARNED, "--minutes", "0.1")
    assert result.exit_code == 1
    assert "no space left" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.unfinished"]
    result = run("--map", LEARNED, "--minutes", "0.1", "--seed", "7")
    assert result.exit_code == 1
    assert "holds an unfinished conversion with other settings (seed: 0, now 7); go on with those" in result.stderr


def test_an_interrupt_before_training_says_what_is_left(run, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("linattn.convert.course.fit_maps", interrupted)
    result = run("--map", "Expansion(num_centres=2)")
    assert result.exit_code == 130
    assert "Interrupted." in result.output
    assert not (tmp_path / "out").exists()


def test_a_figure_that_is_not_finite_is_written_as_text(run, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn.convert.stages.relative_error", lambda x, y: torch.full(x.shape[1:2], torch.inf))
    assert run("--map", "Taylor(order=1)", "--minutes", "0").exit_code == 0
    assert report_of(tmp_path / "out")["stages"][1]["layers"][0]["error"] == "inf"


def test_a_sentence_encoder_is_refused_without_the_package_that_writes_one(text, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn.cli.conversion.find_spec", lambda name: None)
    monkeypatch.setattr("linattn.cli.conversion.convert_", None)
    result = CliRunner(env=WIDE).invoke(
        app, ["convert", "all-MiniLM-L6-v2", str(tmp_path / "out"), "--text", str(text)]
    )
    assert result.exit_code == 1
    assert "needs what is not installed here: pip install sentence-transformers" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_sentence_encoder_loads_as_one(text, tmp_path):
    out = tmp_path / "out"
    more = ["--text", str(text), "--tokens", "24", "--map", "Expansion(num_centres=2)", "--minutes", "0"]
    result = CliRunner(env=WIDE).invoke(app, ["convert", "all-MiniLM-L6-v2", str(out), *more])
    assert result.exit_code == 0, result.output
    loaded = SentenceTransformer(str(out), trust_remote_code=True, device="cpu", local_files_only=True)
    assert sum(isinstance(part, LayerAttention) for part in loaded.modules()) == 6
    sentences = ["Linear time.", "A kernel that factors is a small state."]
    found = loaded.encode(sentences, convert_to_tensor=True)
    inputs = AutoTokenizer.from_pretrained(out)(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = from_pretrained(out)(**inputs)[0]
    mask = inputs["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert "all-MiniLM-L6-v2 with linear attention" in (out / "README.md").read_text(encoding="utf-8")
    assert len(report_of(out)["stages"][-1]["layers"]) == 6


# Beside the ranks, whose server is forked from.
@pytest.mark.xdist_group("ranks")
def test_a_real_interrupt_leaves_the_best_so_far(words, tmp_path):
    command = words("--map", LEARNED, "--minutes", "1")
    checkpoints = tmp_path / "out.unfinished" / "checkpoints" / "transfer"
    with Apart(tmp_path / "printed", *command) as process:
        process.wait_for(lambda: list(checkpoints.glob("step-*")))
        process.interrupt()
        status, output = process.ended()
    (tmp_path / "printed").unlink()
    assert status == 0, output
    assert "Training was interrupted; the best weights until then were kept." in output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    report = report_of(tmp_path / "out")
    assert report["stopped"]
    assert [stage["name"] for stage in report["stages"]] == STAGES[:3]
    assert report["trainings"][0]["best_loss"] < report["trainings"][0]["first_loss"]
    from_pretrained(tmp_path / "out")


# Beside the ranks, whose server is forked from.
@pytest.mark.xdist_group("ranks")
def test_killed_three_times_it_ends_as_if_it_had_not_been(words, tmp_path):
    command = words("--map", LEARNED, "--minutes", "0.05")
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    assert CliRunner(env=WIDE).invoke(app, command).exit_code == 0
    expected = report_of(out)
    out.rename(tmp_path / "uncut")
    # In a checkpoint, in a step of the second training, and when the model is already written.
    deaths = [
        ("linattn.training.tensors", "save_file", 2),
        ("linattn.convert.distilling", "distillation", 20),
        ("linattn.cli.conversion", "model_card", 1),
    ]
    for death in deaths:
        with Apart(tmp_path / "printed", *command, prepare=dying, arguments=death) as process:
            status, output = process.ended()
        (tmp_path / "printed").unlink()
        assert status == -signal.SIGKILL, output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.unfinished", "uncut"]
        if death[1] == "save_file":
            assert len(list((work / "checkpoints" / "transfer").glob(".step-*"))) == 1
    result = CliRunner(env=WIDE).invoke(app, command)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "uncut"]
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "uncut").iterdir())
    found = report_of(out)
    assert [stage["name"] for stage in found["stages"]] == STAGES
    assert found["stages"][:2] == expected["stages"][:2]
    assert found["trainings"][0]["first_loss"] == expected["trainings"][0]["first_loss"]
    # As many steps as the machine's load allows; the ranks of few texts jump from one to the next.
    for ours, theirs in zip(found["stages"][2:], expected["stages"][2:], strict=True):
        for name in ("embedding_cosine", "token_cosine"):
            assert ours["agreement"][name] == pytest.approx(theirs["agreement"][name], abs=0.05)
    for ours, theirs in zip(found["trainings"], expected["trainings"], strict=True):
        assert ours["best_loss"] < ours["first_loss"]
        # All runs together were given the time once.
        assert theirs["seconds"] * 0.5 < ours["seconds"] < theirs["seconds"] * 2


def test_the_best_stage_is_written_and_named(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn.convert.course.measure", Favouring("unconverted"))
    result = run("--map", "FavorPlus(num_features=8)", "--minutes", "0.1")
    assert result.exit_code == 0, result.output
    report, card = report_of(tmp_path / "out"), (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert report["kept"] == "unconverted"
    assert [stage["name"] for stage in report["stages"]] == ["uniform", "unconverted", "converted"]
    words = "Kept: the map as drawn, since distilling made it worse: embedding cosine 0.9884 against 0.9918."
    assert words in result.output.replace("\n", " ")
    assert words in card
    plain, kept = AutoModel.from_pretrained(folder("bert")), from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(weight, kept[name]) for name, weight in plain.state_dict().items())


def test_a_full_disk_at_the_end_names_the_folder_and_loses_no_work(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("linattn.cli.conversion.model_card", full)
        result = run("--map", LEARNED, "--minutes", "0.1")
    assert result.exit_code == 1
    words = f"No space left on device: {tmp_path / 'out'} was not written; free some space, or write elsewhere"
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.unfinished"]
    monkeypatch.setattr("linattn.training.loop._Run._step", None)
    assert run("--map", LEARNED, "--minutes", "0.1").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_a_terminal_the_stages_are_lines(run):
    lines = run("--map", LEARNED, "--minutes", "0.2").output.splitlines()
    assert lines[0] == "Measuring and calibrating"
    for name in ("transfer", "distillation"):
        told = [line for line in lines if line.startswith(f"{name}: ")]
        assert re.fullmatch(rf"{name}: \d+% done, loss \d+\.\d{{4}}, about \d+\.\d minutes left", told[0])
        assert re.fullmatch(rf"{name}: done, loss \d+\.\d{{4}}; measuring", told[-1])
        assert 2 <= len(told) <= 5


def test_help():
    result = CliRunner(env=WIDE).invoke(app, ["convert", "--help"])
    assert result.exit_code == 0
    for option in ("--text", "--map", "--features", "--minutes", "--tokens", "--no-distil", "--seed"):
        assert option in result.output
