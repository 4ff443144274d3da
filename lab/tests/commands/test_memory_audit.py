"""The command `linattn audit --budget`, from the words of the command line to the files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from linattn.cli.app import app
from linattn.hf import ByteTokenizer
from linattn.kv_cache.layer_plans import read_memory_plans, write_memory_plans
from linattn_lab.constant_memory.measuring import MemoryAudit
from linattn_lab.constant_memory.records import MEMORY

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
KINDS = ("sinks + window", "H2O")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(where)
    ByteTokenizer().save_pretrained(where)
    return where


@pytest.fixture
def run(model, tmp_path):
    """A function that runs the command on a tiny model."""
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again; " * 20, encoding="utf-8")

    def with_words(*words):
        fixed = [str(model), "--text", str(text), "--tokens", "96", "--out", str(tmp_path / "out")]
        chosen = [word for kind in KINDS for word in ("--contender", kind)]
        return CliRunner(env=WIDE).invoke(app, ["audit", *fixed, *chosen, *words])

    return with_words


def test_files_and_what_is_printed(run, tmp_path):
    result = run("--budget", "80,40", "--passages", "2")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.html", "memory.jsonl", "report.json"]
    header, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    assert (header.budgets, header.kinds, header.num_tokens) == ([40, 80], list(KINDS), 96)
    assert len(rows) == 2 * (2 + 2 * 2)
    assert "What does a constant memory lose?" in result.output
    assert "sinks 4 + window 36" in result.output
    assert "At the bytes of 80 keys" in result.output


def test_an_interrupted_run_goes_on(run, tmp_path, monkeypatch):
    whole, measured = MemoryAudit.rows, []

    def cut(self, kept, watch):
        for number, row in enumerate(whole(self, kept, watch)):
            if number == 3 and not measured:
                measured.append(number)
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(MemoryAudit, "rows", cut)
    first = run("--budget", "40,80")
    assert first.exit_code == 130
    assert "the same command goes on" in first.output
    again = run("--budget", "40,80")
    assert again.exit_code == 0, again.output
    assert "3 of 6 figures were measured before and are kept" in again.output
    assert len(MEMORY.read(tmp_path / "out" / "memory.jsonl")[1]) == 6


def test_another_audit_s_file_is_kept_aside(run, tmp_path):
    assert run("--budget", "48").exit_code == 0
    result = run("--budget", "48", "--tokens", "64")
    assert "it is another audit's" in result.output
    assert "were measured before" not in result.output
    kept, _ = MEMORY.read(tmp_path / "out" / "memory.1.jsonl")
    assert kept.num_tokens == 96


def test_what_audits_at_other_budgets_measured_is_kept(run, tmp_path):
    """The baselines, and every contender; of two earlier audits together."""
    for budget in ("48", "40"):
        assert run("--budget", budget).exit_code == 0
    alone = [row for number in ("", ".1") for row in MEMORY.read(tmp_path / "out" / f"memory{number}.jsonl")[1]]
    result = run("--budget", "40,48,56")
    assert result.exit_code == 0, result.output
    assert "6 of 8 figures were measured before and are kept" in " ".join(result.output.split())
    header, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    assert header.budgets == [40, 48, 56]
    assert [row.budget for row in rows] == [0, 0, 40, 40, 48, 48, 56, 56]
    assert all(row in alone for row in rows[:6])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budget", "many"), "--budget wants whole numbers"),
        (("--budget", "20", "--map", "Relu"), "--map and --budget are of two audits"),
        (("--budget", "20", "--contender", "oracle"), "oracle"),
        ((), "belong to --budget"),
    ],
)
def test_refusals(run, words, says):
    result = run(*words)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


def test_a_plan_is_made_once_and_measured_on_the_other_half(run, tmp_path):
    words = ("--budget", "48", "--tokens", "64", "--plan-out", str(tmp_path / "plan.json"))
    result = run(*words)
    assert result.exit_code == 0, result.output
    (plan,) = read_memory_plans(tmp_path / "plan.json")
    assert plan.calibration.startswith("second half of")
    header, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    assert header.text.startswith("first half of")
    assert [row.label for row in rows if row.contender == "planned"] == [plan.label]
    assert "Planning at 48 keys" in result.output
    assert f"The plan ({plan.label}) has" in " ".join(result.output.split())
    again = run(*words)
    assert "Planning" not in again.output
    assert "5 of 5 figures were measured before" in again.output
    # Another plan of the same text is measured anew, and nothing else.
    other = replace(plan, choices=["sinks + window"], budgets=[30], labels=["sinks 4 + window 26"])
    write_memory_plans(tmp_path / "plan.json", [other])
    again = run(*words)
    assert "4 of 5 figures were measured before" in again.output
    _, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    assert [row.label for row in rows if row.contender == "planned"] == [other.label]


def test_a_plan_of_another_text_leaves_what_was_measured(run, tmp_path):
    (tmp_path / "other.txt").write_text("some other words, " * 20, encoding="utf-8")
    assert run("--budget", "48").exit_code == 0
    more = ("--plan-out", str(tmp_path / "plan.json"), "--calibration", str(tmp_path / "other.txt"))
    result = run("--budget", "48", *more)
    assert result.exit_code == 0, result.output
    assert "4 of 5 figures were measured before" in result.output
