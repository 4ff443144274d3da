"""The README's code runs, its six lines are what the op computes, and a model of transformers comes back as it was."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import linattn.hf.linearization
from linattn.lab.audit.records import AUDIT, Header, HeadRow, ModelRow, PlanRow
from linattn.lab.experiments import EXPERIMENTS, reproduction
from linattn.lab.experiments.records import CLAIMS
from linattn.lab.experiments.reproduction import Reproduction
from trials import Trial

README = Path(__file__).parents[1] / "README.md"


def blocks() -> list[str]:
    """The README's code: how the op is used, what it equals, layers and models, and a model of transformers."""
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_code_runs_and_the_six_lines_equal_the_op() -> None:
    use, equivalent, *_ = blocks()
    names: dict[str, Any] = {}
    exec(use, names)
    names |= {name: names[name][:, :, :200] / 4 for name in "qkv"}
    exec(equivalent, names)
    expected = linattn.linear_attention(names["q"], names["k"], names["v"], names["favor"])
    # float32 exponents of a few units, summed over 200 keys.
    torch.testing.assert_close(names["out"], expected, rtol=1e-4, atol=1e-5)


def test_a_language_model_streams_generates_and_comes_back(monkeypatch, tmp_path) -> None:
    _, _, code, _ = blocks()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    assert names["logits"].shape == (1, 10, 256)
    assert isinstance(names["model"], linattn.hf.LinearLMForCausalLM)


def test_a_linearized_model_generates_and_comes_back(capsys, monkeypatch, tmp_path) -> None:
    *_, model_code = blocks()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch}
    exec(model_code, names)
    printed = capsys.readouterr().out
    assert "transformer.h.0.attn: softmax (not among `layers`)" in printed
    assert "transformer.h.1.attn: FavorPlus" in printed
    assert not linattn.hf.linearization.is_linearized(names["model"])


@pytest.fixture
def writer(monkeypatch):
    """docs/write_tables.py."""
    spec = importlib.util.spec_from_file_location("write_tables", README.parent / "docs" / "write_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_what_its_file_of_results_gives(writer):
    """Figures are written by docs/write_tables.py; none is written by hand, and none is of an earlier file."""
    places = re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", README.read_text(encoding="utf-8"), re.DOTALL)
    assert dict(places) == writer.tables()
    assert len(places) == 6
    for path, content in writer.written().items():
        assert path.read_text(encoding="utf-8") == content
    assert README.parent / "docs" / "claims.md" in writer.written()


def test_the_claims_say_at_which_setting_they_were_measured(writer):
    claims = json.loads(writer.FIGURES.read_text(encoding="utf-8"))["claims"]
    for setting in ("quick", "full"):
        assert f"`linattn reproduce --{setting}`" in writer.claims_words({**claims, "setting": setting})
        assert f"`linattn reproduce --{setting}`" in writer.claims_page({**claims, "setting": setting})


def test_a_row_of_another_machine_says_so(writer):
    lines = [json.loads(line) for line in writer.RESULTS.read_text(encoding="utf-8").splitlines()]
    usual = lines[0]["machine"]
    assert all(set(line["machine"]) == set(usual) for line in lines)
    told = writer.benchmark_table(lines).splitlines()[-len(lines) :]
    for line, text in zip(lines, told, strict=True):
        assert text.startswith(f"| {line['claim']}")
        assert (" (1 thread)" in text) == (line["machine"]["threads"] == 1)
    other = {**lines[0], "machine": {**usual, "threads": 1, "processor": "another"}}
    assert f"| {other['claim']} (1 thread, processor another) |" in writer.benchmark_table([*lines[1:], other])


def test_the_figures_of_claims_are_of_the_experiments_there_are(writer):
    decisions = json.loads(writer.FIGURES.read_text(encoding="utf-8"))["claims"]["decisions"]
    assert [one["name"] for one in decisions] == list(EXPERIMENTS)
    for one in decisions:
        experiment = EXPERIMENTS[one["name"]]
        assert (one["sentence"], one["source"]) == (experiment.CLAIM, experiment.SOURCE)


def test_figures_are_taken_from_a_report(writer, tmp_path, monkeypatch):
    """What is taken of a report's files comes back in the tables."""
    monkeypatch.setattr(writer, "SHOWN", (("Relu", None),))
    header = Header({}, "m", "M", False, 1, 1, 2, 2, "t", "", 8, 0, 8, ["Relu"], [64], 1, 0, 0.1, "c")
    head = HeadRow(0, 0, "Relu", 2, 0, None, 0.2, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None, 6, 20)
    models = [ModelRow(name, None, 0, 1.0, 1.0) for name in ("exact", "uniform", "planned")]
    plan = PlanRow(0, 0, "Relu", 0.1, None, 0.1, 0.8, 6, 20)
    AUDIT.write(tmp_path / "audit.jsonl", header, [*models, head, ModelRow("Relu", 2, 0, 0.9, 0.9), plan])
    monkeypatch.setattr(reproduction, "EXPERIMENTS", {"first": Trial()})
    run = Reproduction([], "full")
    CLAIMS.write(tmp_path / "claims.jsonl", run.header, run.records([]))
    taken = json.loads(json.dumps(writer.take_figures(tmp_path)))
    assert "| `Relu` | 6 | 20 | 0.20 | 0.25 | 0.900 |" in writer.audit_table(taken["audit"])
    assert taken["audit"]["plan"].startswith("For a target of 0.1: Of 1 heads, 0 stay exact")
    assert f"| {Trial.CLAIM} | **holds** | the largest area is 25 | {Trial.SOURCE} | `first` |" in writer.claims_page(
        taken["claims"]
    )
