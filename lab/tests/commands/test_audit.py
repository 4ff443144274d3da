"""The command `linattn audit`, from the words of the command line to the files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from itertools import islice

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from apart import Apart
from elsewhere import locked_elsewhere
from linattn.cli.app import app
from linattn.hf import load
from linattn_lab.audit import paying
from linattn_lab.audit.grid import SHORT_METHODS
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AUDIT, HeadRow, LengthsRow, RankRow, TimeRow
from linattn_lab.audit.truth import LayerTruth
from linattn_lab.report.audit.summary import summarise_audit
from pages import Page

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


@pytest.fixture(scope="module")
def wide_folder(folder, tmp_path_factory):
    """A small model whose heads are 256 wide."""
    where = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=64, head_dim=256, intermediate_size=16, pad_token_id=0, **sizes)
    transformers.LlamaModel(config).save_pretrained(where)
    transformers.AutoTokenizer.from_pretrained(folder("llama")).save_pretrained(where)
    return where


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
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.jsonl", "index.html", "report.json"]
    header, rows = AUDIT.read(tmp_path / "out" / "audit.jsonl")
    assert (header.features, header.draws, header.seed, header.num_tokens) == ([8, 16], 2, 3, 32)
    assert header.maps == ["FavorPlus", "Centred(Taylor(order=1))"]
    heads = 2 * 4
    assert len(without_times(rows)) == 2 + 2 + (2 * 2 + 1) * (heads + 1) + 3 * 2
    assert sum(isinstance(row, TimeRow) for row in rows) == 3
    assert "uniform attention" in result.output
    assert "Up to 80 numbers per head, what 8 random features keep" in result.output
    assert str(tmp_path / "out" / "index.html") in result.output.replace("\n", "")


def test_a_short_text_is_announced(run, tmp_path):
    result = run("--map", "Relu", "--tokens", "100")
    assert "gives only 64 tokens; all of them are read." in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--map", "Performer"], "there is no feature map 'Performer'; write one of Exponential"),
        (["--features", "7", "--map", "Hyperbolic"], "multiple of 2"),
        (["--draws", "0"], "draws must be at least 1"),
        (["--tokens", "5000"], "--tokens must be at least 1 and at most 2048"),
        (["--text", "/nowhere/text.txt"], "there is no text file"),
        (["--map", "Centred(Relu)"], "softmax kernel"),
    ],
)
def test_refusals(run, tmp_path, words, message):
    result = run(*words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [[], ["--budget", "16"]])
def test_a_folder_in_use_is_refused_before_anything_is_measured(run, tmp_path, more):
    with locked_elsewhere(tmp_path / "out"):
        result = run(*more)
    assert result.exit_code == 1
    assert "is in use by another process; wait until that has ended, or take another folder" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def ends(monkeypatch):
    """A function that lets every audit from now on end in an interrupt after so many rows; None: not at all."""
    measure = Audit.rows

    def after(number):
        def interrupted(self, *words):
            yield from islice(measure(self, *words), number)
            raise KeyboardInterrupt

        monkeypatch.setattr(Audit, "rows", measure if number is None else interrupted)

    return after


def figures(path):
    """The rows of an audit's file, of which none may be there twice."""
    rows = AUDIT.read(path)[1]
    assert len(set(rows)) == len(rows)
    return rows


def without_times(rows):
    """All but what depends on the machine."""
    return [row for row in rows if not isinstance(row, TimeRow | LengthsRow)]


@pytest.fixture
def measured(monkeypatch):
    """The methods measured on a layer, in order."""
    measure, found = LayerTruth.measure, []

    def counted(self, built):
        found.append(built.method.label)
        return measure(self, built)

    monkeypatch.setattr(LayerTruth, "measure", counted)
    return found


# Two baselines, two layers' attention rows, five ranks of two layers of four heads, then for each method two layers of
# attention rows and heads, the model's time and the whole model; times at growing lengths come last.
CUT_OFF = ["--full", "--features", "8", "--draws", "1"]


@pytest.fixture
def two_methods(monkeypatch):
    """All methods are two."""
    monkeypatch.setattr("linattn_lab.commands.head_audit.FULL_METHODS", ("FavorPlus", "Relu"))


@pytest.fixture(scope="module")
def uncut():
    """The rows of an audit that was not interrupted, once one has run."""
    return []


@pytest.mark.parametrize("number", [0, 1, 3, 46, 49, 55, 56, 61, 66, 68])
def test_an_interrupted_audit_goes_on_to_the_same_figures(run, tmp_path, ends, measured, number, two_methods, uncut):
    file = tmp_path / "out" / "audit.jsonl"
    if not uncut:
        run(*CUT_OFF)
        uncut += figures(file)
        file.unlink()
    assert len(without_times(uncut)) == 66
    ends(number)
    result = run(*CUT_OFF)
    assert result.exit_code == 130
    assert ("run the same command again to resume" in result.output) == (number > 0)
    assert without_times(figures(file)) == without_times(uncut[:number])
    ends(None)
    measured.clear()
    assert run(*CUT_OFF).exit_code == 0
    assert set(without_times(figures(file))) == set(without_times(uncut))
    assert [type(row) for row in figures(file)].count(TimeRow) == 2
    layers = (max(number - 44, 0) // 5, max(number - 56, 0) // 5)
    assert measured == ["FavorPlus"] * max(2 - layers[0], 0) + ["Relu"] * max(2 - layers[1], 0)
    assert sorted(path.name for path in file.parent.iterdir()) == ["audit.jsonl", "index.html", "report.json"]


def test_a_finished_audit_is_measured_anew_when_asked_for(run, tmp_path, measured):
    file = tmp_path / "out" / "audit.jsonl"
    run("--map", "Relu")
    before, rows = file.read_bytes(), figures(file)
    assert run("--map", "Relu").exit_code == 0
    assert file.read_bytes() == before
    assert measured == ["Relu"] * 2
    assert run("--map", "Relu", "--again").exit_code == 0
    assert measured == ["Relu"] * 4
    assert without_times(figures(file)) == without_times(rows)
    assert file.with_name("audit.replaced.1.jsonl").read_bytes() == before


def test_an_interrupt_leaves_a_page_of_what_is_measured(run, tmp_path, ends):
    words = ["--map", "FavorPlus", "--map", "Relu", "--features", "8", "--draws", "2"]
    ends(2 + 2 + 12 + 2)
    result = run(*words)
    assert f"{tmp_path / 'out' / 'index.html'} shows what is measured so far: 1 method." in result.output.replace(
        "\n", ""
    )
    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "Not finished: FavorPlus; Relu are still to be measured" in page.text
    summary = summarise_audit(tmp_path / "out" / "audit.jsonl")
    assert [(line.map, line.draws) for line in summary.lines] == [("FavorPlus", 1)]
    ends(None)
    assert run(*words).exit_code == 0
    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "Not finished" not in page.text


def test_another_audit_is_kept_aside_and_gone_on_from(run, tmp_path, ends):
    file = tmp_path / "out" / "audit.jsonl"
    run("--map", "Relu")
    before = file.read_bytes()
    ends(5)
    result = run("--map", "FavorPlus", "--features", "8")
    assert result.exit_code == 130
    said = result.output.replace("\n", "")
    assert f"What was measured before is now in {file.with_name('audit.1.jsonl')}. It is of another model" in said
    assert file.with_name("audit.1.jsonl").read_bytes() == before
    assert AUDIT.read(file)[0].maps == ["FavorPlus"]
    ends(0)
    run("--map", "Relu")
    assert file.read_bytes() == before
    assert len(figures(file.with_name("audit.2.jsonl"))) == 5


def test_other_weights_in_the_folder_are_another_model(folder, prose, tmp_path):
    """Every figure is measured again of a model that was trained further, and the former ones are kept aside."""
    where, text, file = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out" / "audit.jsonl"
    shutil.copytree(folder("bert"), where)
    text.write_text(prose, encoding="utf-8")
    words = ["audit", str(where), "--text", str(text), "--tokens", "32", "--out", str(file.parent), "--map", "Relu"]
    assert CliRunner(env=WIDE).invoke(app, words).exit_code == 0
    weights = load_file(where / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, where / "model.safetensors", {"format": "pt"})
    result = CliRunner(env=WIDE).invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "It is of another model" in result.output
    assert "were measured before" not in result.output
    before, after = (
        [row.uniform_error for row in AUDIT.read(path)[1] if isinstance(row, HeadRow)]
        for path in (file.with_name("audit.1.jsonl"), file)
    )
    assert before != after


def test_a_file_that_is_no_audit_is_kept_aside(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "audit.jsonl").write_text("something else\n")
    assert run("--map", "Relu").exit_code == 0
    assert (tmp_path / "out" / "audit.1.jsonl").read_text() == "something else\n"


def test_every_stage_is_told_without_a_terminal(run):
    output = run("--map", "FavorPlus", "--map", "Relu", "--features", "8", "--draws", "2").output
    wanted = (
        "Loading ",
        "Recording the attention of",
        "Measuring takes about ",
        "Exact attention and uniform attention",
    )
    wanted += ("FavorPlus, 8 features, draw 1 of 2", "FavorPlus, 8 features, draw 2 of 2", "Relu, 8 features")
    places = [output.index(words) for words in wanted]
    assert places == sorted(places)
    line = next(line for line in output.splitlines() if line.startswith("Relu, 8 features"))
    assert re.fullmatch(r"Relu, 8 features \(\d+%, \d+:\d\d passed, about \d+:\d\d left\)", line)


def test_methods_that_cannot_pay_are_left_out_unless_asked_for(run, wide_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn_lab.commands.head_audit.SHORT_METHODS", ("Relu", "Expansion(num_centres=64)"))
    monkeypatch.setattr("linattn_lab.commands.head_audit.load", lambda name: load(str(wide_folder)))
    reason = "on heads 256 wide its state has 4,227,200 numbers, as many as the keys and values of 8,257 tokens"
    reason += "; --map measures it all the same"
    result = run()
    assert result.exit_code == 0, result.output
    assert f"Left out: Expansion(num_centres=64): {reason}." in result.output
    header, rows = AUDIT.read(tmp_path / "out" / "audit.jsonl")
    assert (header.maps, header.left_out) == (["Relu"], {"Expansion(num_centres=64)": reason})
    assert {row.map for row in rows if isinstance(row, HeadRow)} == {"Relu"}
    page = Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert f"Expansion(num_centres=64): {reason}." in page.text
    assert "Left out" not in run("--map", "Expansion(num_centres=64)").output
    assert AUDIT.read(tmp_path / "out" / "audit.jsonl")[0].left_out == {}


@pytest.mark.parametrize(("family", "left_out"), [("llama", ["merged 128"]), ("bert", [])])
def test_methods_that_a_model_cannot_call_are_left_out(run, tmp_path, monkeypatch, family, left_out):
    """All others of the short grid are measured; by name such a method is refused before anything else is."""
    monkeypatch.setattr(paying, "_MOST_SECONDS", 0.0)
    result = run("--features", "8", family=family)
    assert result.exit_code == 0, result.output
    header, rows = AUDIT.read(tmp_path / "out" / "audit.jsonl")
    assert (list(header.left_out), len(header.maps)) == (left_out, len(SHORT_METHODS) - len(left_out))
    assert {row.map for row in rows if isinstance(row, HeadRow)} == set(header.maps)
    monkeypatch.setattr(LayerTruth, "__init__", lambda *_, **__: pytest.fail("measured"))
    for method in left_out:
        refused = run("--map", "Relu", "--map", method, family=family)
        assert (refused.exit_code, "give window too" in refused.output) == (1, True)


def test_the_short_grid_is_measured_unless_more_is_asked_for(run, tmp_path, monkeypatch):
    """One width, one draw and no limits of ranks; --full takes all of them, and says how the rest is had."""
    monkeypatch.setattr("linattn_lab.commands.head_audit.SHORT_METHODS", ("FavorPlus",))
    monkeypatch.setattr("linattn_lab.commands.head_audit.FULL_METHODS", ("FavorPlus", "Relu"))
    shown = run(family="bert").output
    assert "1 of 2 methods are measured; --full measures all." in shown
    header, rows = AUDIT.read(tmp_path / "out" / "audit.jsonl")
    assert (header.maps, header.features, header.draws) == (["FavorPlus"], [256], 1)
    assert not any(isinstance(row, RankRow) for row in rows)
    assert "--full" not in run("--full", family="bert").output
    header, rows = AUDIT.read(tmp_path / "out" / "audit.jsonl")
    assert (header.maps, header.features, header.draws) == (["FavorPlus", "Relu"], [64, 256], 3)
    assert any(isinstance(row, RankRow) for row in rows)
    assert (tmp_path / "out" / "audit.1.jsonl").exists()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_was_swallowed(run, tmp_path, monkeypatch):
    """Python ignores what a signal handler raises inside a destructor or a weak reference's callback."""
    measure = Audit.rows

    def swallowing(self, *words):
        for row in measure(self, *words):
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    monkeypatch.setattr(Audit, "rows", swallowing)
    before = signal.getsignal(signal.SIGINT)
    assert run("--map", "Relu").exit_code == 130
    assert figures(tmp_path / "out" / "audit.jsonl") == []
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_the_page_is_written(run, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("linattn_lab.commands.head_audit.write_report", interrupted)
    assert run("--map", "Relu").exit_code == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["audit.jsonl"]
    AUDIT.read(tmp_path / "out" / "audit.jsonl")


# Beside the ranks, whose server is forked from.
@pytest.mark.xdist_group("ranks")
def test_a_real_interrupt(folder, prose, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(prose, encoding="utf-8")
    words = ["--text", str(text), "--tokens", "32", "--map", "FavorPlus", "--draws", "5000", "--out", str(out)]
    words = ["audit", folder("bert"), *words]
    file, kept = out / "audit.jsonl", 0
    for number in range(2):
        with Apart(tmp_path / "printed", *words) as process:
            many = kept + 100
            process.wait_for(lambda many=many: file.exists() and len(file.read_text().splitlines()) >= many)
            process.interrupt()
            status, output = process.ended()
        assert status == 130
        assert "run the same command again to resume" in output.replace("\n", " ")
        assert ("figures were measured before and are kept" in output) == (number == 1)
        before, kept = kept, len(figures(file))
        assert kept > before
        assert sorted(path.name for path in out.iterdir()) == ["audit.jsonl", "index.html", "report.json"]
        assert "Not finished: FavorPlus" in Page((out / "index.html").read_text(encoding="utf-8")).text


def test_help(monkeypatch):
    result = CliRunner(env=WIDE).invoke(app, ["audit", "--help"])
    assert result.exit_code == 0
    for option in ("--text", "--map", "--full", "--features", "--tokens", "--draws", "--seed", "--out"):
        assert option in result.output
