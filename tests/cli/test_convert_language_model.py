"""The command `linattn convert` on a softmax LinearLM, which becomes a linear one of the same class."""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from linattn.cli.app import app
from linattn.hf import ByteTokenizer, LinearLMForCausalLM
from linattn.nn import LinearAttention
from programs import TRANSFORMERS
from twins import byte_ids, prose, twin

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
SCRIPT = """
import sys, torch, linattn.hf
from transformers import AutoModelForCausalLM
model, ids = AutoModelForCausalLM.from_pretrained(sys.argv[1]), torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(ids, use_cache=False).logits, sys.argv[3])
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the text and with twins by name."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "text.txt").write_text(prose(), encoding="utf-8")
    for name, options in {"twin": {}, "gated": {"gate": "Alibi"}, "hybrid": {"pattern": "sl"}}.items():
        twin(**options).save_pretrained(folder / name)
    return folder


@pytest.fixture
def run(files, tmp_path, monkeypatch):
    """A function that runs the command, on a clock of which every look takes half a second."""
    clock = count(0.0, 0.5)
    monkeypatch.setattr("linattn.training.loop.time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def of(*more, name="twin"):
        words = ["convert", str(files / name), str(tmp_path / "out"), "--text", str(files / "text.txt")]
        return CliRunner(env=WIDE).invoke(app, [*words, "--tokens", "48", *more])

    return of


def divergence(model, exact, ids):
    """Mean KL of predictions from the exact ones, in nats."""
    with torch.no_grad():
        ours, theirs = (one(ids, use_cache=False).logits.double().log_softmax(-1) for one in (model, exact))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.parametrize(
    ("words", "method", "stages"),
    [
        (
            ["--map", "LearnedExponential", "--features", "8", "--minutes", "1"],
            "LearnedExponential(num_features=8)",
            ["uniform", "unconverted", "calibrated", "converted"],
        ),
        (
            ["--map", "Expansion(num_centres=4) + window 4", "--minutes", "0.5"],
            "Expansion(num_centres=4) + window 4",
            ["uniform", "calibrated", "converted"],
        ),
    ],
    ids=["learned", "fitted"],
)
def test_the_twin_becomes_a_linear_model_of_its_class(run_program, run, files, tmp_path, words, method, stages):
    result = run(*words)
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    read, exact = AutoModelForCausalLM.from_pretrained(out), LinearLMForCausalLM.from_pretrained(files / "twin")
    assert type(read) is LinearLMForCausalLM
    assert (read.config.pattern, read.config.method) == ("l", method)
    assert all(isinstance(block.attention, LinearAttention) for block in read.model.blocks)
    assert type(AutoTokenizer.from_pretrained(out)) is ByteTokenizer
    report = json.loads((out / "conversion.json").read_text(encoding="utf-8"))
    assert [stage["name"] for stage in report["stages"]] == stages
    found = {stage["name"]: stage["agreement"]["divergence"] for stage in report["stages"]}
    # Training brings the predictions nearer to the softmax twin's, and the folder holds the trained model.
    results = [found[name] for name in stages[1:]]
    assert results == sorted(results, reverse=True)
    assert len(set(results)) == len(results)
    assert found["converted"] < found["uniform"]
    assert report["kept"] == "converted"
    assert all(training["best_loss"] < training["first_loss"] for training in report["trainings"])
    assert divergence(read, exact, byte_ids(16, 48)) < found["uniform"]
    errors = [stage["layers"][0]["layer"] for stage in report["stages"][1:]]
    assert set(errors) == {"model.blocks.0.attention"}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "AutoModelForCausalLM.from_pretrained`, after `import linattn.hf`" in card
    assert "linattn.hf.from_pretrained" not in card
    # Another process has the same outputs; generation keeps as much after 40 tokens as after 8.
    ids = byte_ids(2, 12, seed=3)
    torch.save(ids, tmp_path / "ids")
    done = run_program(SCRIPT, *(tmp_path / name for name in ("out", "ids", "logits")), after=TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits"), read(ids, use_cache=False).logits)
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    kept = [read.generate(ids, max_new_tokens=length, **options).past_key_values.num_bytes for length in (8, 40)]
    assert kept[0] == kept[1]


def test_maps_alone_are_trained_where_that_is_wanted(run, files, tmp_path):
    result = run("--map", "LearnedExponential(num_features=4)", "--minutes", "0.2", "--no-distil")
    assert result.exit_code == 0, result.output
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    exact = LinearLMForCausalLM.from_pretrained(files / "twin").state_dict()
    assert exact.keys() == {name for name in read if ".feature_map." not in name}
    assert all(torch.equal(read[name], weight) for name, weight in exact.items())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gated", [], "the softmax of this LinearLM is gated (gate='Alibi')"),
        ("hybrid", [], "the blocks of this LinearLM at [1] are linear already"),
        ("twin", ["--map", "Taylor(order=2, scale=1.0)"], "leave scale out of the method"),
    ],
)
def test_refusals_leave_nothing(run, tmp_path, name, words, message):
    result = run(*words, name=name)
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())
