"""The command `linattn audit --budget`, from the words of the command line to the files."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from linattn.cli.app import app
from linattn.hf import ByteTokenizer
from linattn.kv_cache.layer_plans import read_memory_plans
from linattn_lab.kv_audit.measuring import MemoryAudit
from linattn_lab.kv_audit.names import BOUNDED
from linattn_lab.kv_audit.records import MEMORY, PassageRow, TaskRow

pytestmark = pytest.mark.usefixtures("unprofiled")

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
KINDS = (BOUNDED, "merged keys")


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
        fixed = [str(model), "--text", str(text), "--out", str(tmp_path / "out")]
        tokens = [] if "--tokens" in words else ["--tokens", "96"]
        chosen = [word for kind in KINDS for word in ("--method", kind)]
        return CliRunner(env=WIDE).invoke(app, ["audit", *fixed, *tokens, *chosen, *words])

    return with_words


def test_files_and_what_is_printed(run, tmp_path):
    result = run("--budget", "80,40", "--passages", "2", "--tokens", "96,64")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.html", "memory.jsonl", "report.json"]
    header, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    assert (header.budgets, header.kinds, header.lengths) == ([40, 80], list(KINDS), [64, 96])
    assert len(rows) == 2 * 2 * (2 + 2 * 2)
    words = " ".join(result.output.split())
    assert re.search(r"24 figures to measure, about \d+ (seconds|minutes?) on this machine\.", words)
    assert "What does a bounded KV cache lose?" in words
    assert "64 tokens within the bytes of 80 keys" in words
    assert "needles" not in words
    assert "Greedy continuation of" in words
    assert "full cache: " in words
    written = [row.written for row in rows if row.method == "full cache"]
    assert all(0 < len(text) <= 64 for text in written)


def test_an_interrupted_run_goes_on(run, tmp_path, monkeypatch):
    whole, measured = MemoryAudit.rows, []

    def cut(self, earlier, watch):
        for number, row in enumerate(whole(self, earlier, watch)):
            if number == 3 and not measured:
                measured.append(number)
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(MemoryAudit, "rows", cut)
    first = run("--budget", "40,80")
    assert first.exit_code == 130
    assert "run the same command again to resume" in first.output
    early = MEMORY.so_far(tmp_path / "out" / "memory.jsonl")[1]
    again = run("--budget", "40,80")
    assert again.exit_code == 0, again.output
    assert "3 of 6 figures were measured before and are kept" in again.output
    assert MEMORY.read(tmp_path / "out" / "memory.jsonl")[1][:3] == early


def test_measuring_again_is_resumed_without_what_it_put_aside(run, tmp_path, monkeypatch):
    assert run("--budget", "40,80").exit_code == 0
    file, whole = tmp_path / "out" / "memory.jsonl", MemoryAudit.rows

    def cut(self, earlier, watch):
        yield from itertools.islice(whole(self, earlier, watch), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MemoryAudit, "rows", cut)
        first = run("--budget", "40,80", "--again")
    assert first.exit_code == 130
    assert "run the same command again without --again to resume" in first.output
    early = MEMORY.so_far(file)[1]
    assert len(early) == 2
    again = run("--budget", "40,80")
    assert "2 of 6 figures were measured before and are kept" in again.output
    assert MEMORY.read(file)[1][:2] == early


def test_a_damaged_file_is_kept_aside_and_called_so(run, tmp_path):
    assert run("--budget", "40").exit_code == 0
    file = tmp_path / "out" / "memory.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join([lines[0], "\0" + lines[1], *lines[2:]]), encoding="utf-8")
    assert "it cannot be read: damaged, or of another version" in run("--budget", "40").output


def test_an_interrupt_before_anything_is_measured_names_no_other_audit(run, monkeypatch):
    """Whose figures are in the folder."""
    assert run("--budget", "40").exit_code == 0

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("linattn_lab.commands.memory_audit.load_language_model", interrupted)
    result = run("--budget", "80")
    assert result.exit_code == 130
    assert "Nothing was measured yet" in result.output


def test_a_text_that_is_measured_is_none_to_plan_on(run, model, tmp_path):
    texts = next(path for path in tmp_path.iterdir() if path.is_file())
    result = run("--budget", "40", "--plan-out", str(tmp_path / "plan.json"), "--calibration", str(texts))
    assert result.exit_code == 1
    assert "--calibration is a text that is measured; give another file, or leave it out" in result.output
    assert not (tmp_path / "plan.json").exists()


def test_a_text_that_is_called_as_a_task_is(model, tmp_path, monkeypatch):
    """Once more, nothing is measured and the file holds what it held."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts").write_text("a few words, again and again; " * 100, encoding="utf-8")
    words = ["audit", str(model), "--text", "facts", "--budget", "40", "--tokens", "1900", "--method", "merged keys"]
    assert CliRunner(env=WIDE).invoke(app, words).exit_code == 0
    first = MEMORY.read(tmp_path / "report" / "memory.jsonl")
    assert {type(row) for row in first[1]} == {PassageRow, TaskRow}
    assert CliRunner(env=WIDE).invoke(app, words).exit_code == 0
    assert MEMORY.read(tmp_path / "report" / "memory.jsonl") == first


def test_another_audit_s_file_is_kept_aside(run, tmp_path):
    assert run("--budget", "48").exit_code == 0
    result = run("--budget", "48", "--passages", "2")
    assert "it is another audit's" in result.output
    assert "were measured before" not in result.output
    former, _ = MEMORY.read(tmp_path / "out" / "memory.1.jsonl")
    assert former.num_passages == 1


def test_other_weights_in_the_folder_are_another_model(run, model, tmp_path):
    """Of a model trained further every figure is measured, and the plan is made, again; and in another dtype."""
    words = ("--budget", "48", "--tokens", "64", "--plan-out", str(tmp_path / "plan.json"))
    assert run(*words).exit_code == 0
    file = model / "model.safetensors"
    former, weights = file.read_bytes(), load_file(file)
    save_file({name: weight.neg() for name, weight in weights.items()}, file, {"format": "pt"})
    try:
        for more in ((), ("--dtype", "bfloat16")):
            again = run(*words, *more)
            assert again.exit_code == 0, again.output
            assert "it is another audit's" in again.output
            assert "Planning at 48 keys" in again.output
            assert "were measured before" not in again.output
    finally:
        file.write_bytes(former)
    before, after = (
        [row.perplexity for row in MEMORY.read(tmp_path / "out" / f"memory{number}.jsonl")[1]]
        for number in (".1", ".2")
    )
    assert before[0] != after[0]
    assert run(*words).exit_code == 0


def test_what_is_measured_again_is_kept_aside(run, tmp_path):
    assert run("--budget", "40,48").exit_code == 0
    result = run("--budget", "48", "--again")
    assert "memory.replaced.1.jsonl." in result.output.replace("\n", "")
    assert "were measured before" not in result.output
    former, rows = MEMORY.read(tmp_path / "out" / "memory.replaced.1.jsonl")
    assert (former.budgets, len(rows)) == ([40, 48], 6)


def test_what_audits_at_other_budgets_and_lengths_measured_is_kept(run, tmp_path):
    """The baselines, and every method; of two earlier audits together."""
    for words in (("--budget", "48"), ("--budget", "40", "--tokens", "64")):
        assert run(*words).exit_code == 0
    alone = [row for number in ("", ".1") for row in MEMORY.read(tmp_path / "out" / f"memory{number}.jsonl")[1]]
    result = run("--budget", "40,48", "--tokens", "64,96")
    assert result.exit_code == 0, result.output
    assert "8 of 12 figures were measured before and are kept" in " ".join(result.output.split())
    _, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    assert len(rows) == 12
    assert all(row in rows for row in alone)


def test_keys_of_the_dtype(run, tmp_path):
    result = run("--budget", "60", "--dtype", "bfloat16", "--method", "window 8 + merged 20")
    assert result.exit_code == 0, result.output
    header, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    assert (header.dtype, header.number_bytes) == ("bfloat16", 2)
    # One layer of two heads, 8 numbers wide; a key and its value take 32 bytes.
    assert rows[0].num_bytes == 2 * 96 * 32
    assert [row.method for row in rows][2] == "window 8 + merged 20"
    assert all(row.num_bytes <= 2 * 60 * 32 for row in rows if row.budget)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budget", "20", "--map", "Relu"), "--map and --budget are of two audits"),
        (("--budget", "20", "--method", "oracle"), "--method must be among 'bounded cache'"),
        (("--budget", "20", "--task", "oracle"), "--task must be among facts, niah_single"),
        (("--budget", "20", "--text-kind", "prose"), "--text-kind is of the texts that come with Python"),
        (("--budget", "20", "--dtype", "half"), "--dtype must be one of float32, bfloat16; got 'half'"),
        (
            ("--budget", "20", "--method", BOUNDED),
            "must be different, got bounded cache, merged keys, bounded cache",
        ),
        (("--budget", "20", "--task", "vt", "--task", "vt"), "--task must be different, got vt, vt; name each once"),
        (("--budget", "20", "--samples", "0"), "--samples must be at least 1, got 0"),
        ((), "belong to --budget"),
        (("--budget", "1"), "no method fits: bounded cache at 1: a budget of 1 keys is too small"),
        (("--budget", "9999999"), "--budget must be from 1 to 1048576 keys, got 9999999"),
    ],
)
def test_refusals(run, words, says):
    result = run(*words)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize("words", [("--method", "oracle"), ("--task", "oracle"), ("--passages", "0")])
def test_wrong_names_and_numbers_are_refused_before_a_model_is_loaded(words, tmp_path):
    asked = ["audit", "no-such-model", "--budget", "20", "--out", str(tmp_path), *words]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert f"linattn audit: {words[0]} must be" in " ".join(result.output.split())


def test_what_is_left_out_is_named_before_anything_is_measured(run):
    """A method without room, and needles in a short text: the table has neither."""
    result = run("--budget", "4,48")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "Left out: bounded cache at 4: a budget of 4 keys is too small" in words
    assert "Left out: facts at 96: between what is told and what is asked" in words
    assert words.index("Left out") < words.index("figures to measure")


def test_a_text_that_cannot_be_read_is_refused_before_a_model_is_loaded(run, tmp_path):
    """A model may take minutes."""
    result = run("--budget", "48", "--text", str(tmp_path / "none.txt"))
    assert result.exit_code == 1
    assert "there is no text file" in result.output
    assert "Loading" not in result.output


def test_numbers_are_those_of_an_option(run):
    result = run("--budget", "many")
    assert result.exit_code == 2
    assert "Invalid value for --budget: wanted different positive whole numbers" in " ".join(result.output.split())


def test_a_plan_is_made_once_and_measured_on_the_other_half(run, tmp_path):
    words = ("--budget", "48", "--tokens", "64", "--plan-out", str(tmp_path / "plan.json"))
    result = run(*words)
    assert result.exit_code == 0, result.output
    (plan,) = read_memory_plans(tmp_path / "plan.json")
    assert plan.calibration.startswith("second half of")
    header, rows = MEMORY.read(tmp_path / "out" / "memory.jsonl")
    (source,) = header.texts.values()
    assert source.startswith("first half of")
    assert "Planning at 48 keys" in result.output
    planned = [row.label for row in rows if row.method == "planned"]
    assert planned == ([plan.label] if "sinks + window" not in plan.choices else [])
    again = run(*words)
    assert "Planning" not in again.output
    assert f"{len(rows)} of {len(rows)} figures were measured before" in again.output


def test_plans_of_other_budgets_are_kept_and_former_ones_renamed(run, tmp_path):
    file = tmp_path / "plan.json"
    for budget in ("48", "40"):
        assert run("--budget", budget, "--tokens", "64", "--plan-out", str(file)).exit_code == 0
    former = file.read_bytes()
    assert [plan.budget for plan in read_memory_plans(file)] == [40, 48]
    assert not (tmp_path / "plan.1.json").exists()
    result = run("--budget", "40", "--tokens", "64", "--plan-out", str(file), "--again")
    assert "plan.1.json." in result.output.replace("\n", "")
    assert (tmp_path / "plan.1.json").read_bytes() == former
    assert [plan.budget for plan in read_memory_plans(file)] == [40, 48]


def test_a_file_that_holds_no_plans_is_not_written_over(run, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn_lab.commands.memory_audit.load_language_model", None)
    file = tmp_path / "notes.json"
    file.write_text('{"mine": 1}')
    result = run("--budget", "48", "--plan-out", str(file))
    assert result.exit_code == 1
    assert "notes.json" in result.stderr
    assert file.read_text() == '{"mine": 1}'


def test_a_plan_of_another_text_leaves_what_was_measured(run, tmp_path):
    (tmp_path / "other.txt").write_text("some other words, " * 20, encoding="utf-8")
    assert run("--budget", "48").exit_code == 0
    more = ("--plan-out", str(tmp_path / "plan.json"), "--calibration", str(tmp_path / "other.txt"))
    result = run("--budget", "48", *more)
    assert result.exit_code == 0, result.output
    assert "4 of " in result.output
    assert "figures were measured before" in result.output
