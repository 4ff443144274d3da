"""A language model converted to a budget of bytes: the method, recall on the way, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from linattn.convert import convert_
from linattn.convert.samples import from_texts
from linattn.hf import LayerAttention, from_pretrained, is_linearized
from linattn.lab.commands.app import app
from linattn.lab.constant_memory import converting
from linattn.lab.constant_memory.converting import BoundedMemory
from linattn.lab.constant_memory.planning import PLAIN, Choice, Trial

TOKENS, BUDGET = 320, 100


@pytest.fixture(scope="module")
def prose(words):
    """The letters in paragraphs."""
    letters = words.content * 8
    return "\n\n".join(f"{number} {letters[64 * number : 64 * number + 64]}" for number in range(400))


def samples_of(loaded, text):
    return from_texts(loaded.tokenizer, (text,), num_tokens=TOKENS, batch_size=1, seed=0)


@pytest.fixture
def choosing(monkeypatch):
    """A function that makes plans choose what has this in its name."""

    def of(name):
        def choose(candidates, num_layers, budget, measure, *, is_common):
            assert num_layers == 2
            assert not is_common
            wanted = next(one for one in candidates if name in one)
            keys = (budget, budget) if wanted == PLAIN else (budget + budget // 4, budget - budget // 4)
            given = [tuple(Choice(one, n) for n in (keys if one == wanted else (budget, budget))) for one in candidates]
            trials = [Trial(choices, measure(choices)) for choices in given]
            return sorted(trials, key=lambda trial: trial.choices[0].name != wanted)

        monkeypatch.setattr("linattn.lab.constant_memory.measuring.choose", choose)

    return of


def test_recall_and_the_method_and_the_model_as_it_was(tiny, prose, choosing):
    choosing("50%")
    loaded = tiny("hybrid")
    samples = samples_of(loaded, prose)
    before = loaded.model(samples.held_out[0]["input_ids"]).logits
    bounded = BoundedMemory(loaded, samples, BUDGET, TOKENS)
    assert torch.equal(loaded.model(samples.held_out[0]["input_ids"]).logits, before)
    assert not is_linearized(loaded.model)
    plan = bounded.plan
    assert plan.layers == [2, 4]
    assert plan.budgets == [125, 75]
    assert len(set(plan.labels)) == 2
    found = bounded.finished()
    assert [one.model for one in found.recall] == ["exact attention", "before training", "converted"]
    assert found.recall[0].scores == found.recall[2].scores
    assert set(found.recall[0].scores) | set(found.left_out) == {"repeated passages", "needles", "multi-query recall"}
    assert found.table().rows[0][0] == "exact attention"
    assert f"{plan.kl:.4f}" in found.sentence()
    assert f"{plan.window_kl:.4f}" in found.sentence()


def test_refused(tiny, prose, choosing):
    loaded = tiny("hybrid")
    samples = samples_of(loaded, prose)
    with pytest.raises(ValueError, match=r"never exceed a budget of 320 keys.*give --tokens 640 or more"):
        BoundedMemory(loaded, samples, TOKENS, TOKENS)
    choosing(PLAIN)
    with pytest.raises(ValueError, match=r"nothing is better by a margin than sinks 4 \+ window 96"):
        BoundedMemory(loaded, samples, BUDGET, TOKENS)


def test_the_command(tiny, prose, choosing, tmp_path, monkeypatch):
    configs = []

    def noted(model, tokenizer, config, **options):
        configs.append(config)
        return convert_(model, tokenizer, config, **options)

    monkeypatch.setattr("linattn.lab.commands.convert.convert_", noted)
    choosing("25%")
    loaded = tiny("hybrid")
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(prose, encoding="utf-8")
    words = ["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt")]
    words += ["--minutes", "0.02", "--tokens", str(TOKENS), "--adapters", "2"]
    run = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke
    for more in (["--map", "FavorPlus"], ["--target", "0.1"]):
        refused = run(app, [*words, "--budget", str(BUDGET), *more])
        assert refused.exit_code == 1
        assert "--budget chooses a method, and --map and --target do; give one of the three" in refused.output
    result = run(app, [*words, "--budget", str(BUDGET)])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "out" / "README.md").read_text()
    memory = json.loads((tmp_path / "out" / "memory.json").read_text())
    labels = memory["plan"]["labels"]
    assert len(set(labels)) == 2
    assert f"attend by `{'; '.join(labels)}`" in card
    assert "perplexity" in card
    # No text is so short that the budget holds all of it.
    assert [config.min_tokens for config in configs] == [min(BUDGET * 3 // 2, TOKENS)]
    assert converting.RECALL in card
    for name in ("exact attention", "before training", "converted"):
        assert f"| {name} |" in card
    assert "recall" in result.output
    made = from_pretrained(tmp_path / "out")
    kernels = [module for module in made.modules() if isinstance(module, LayerAttention)]
    assert [group.exact.label for kernel in kernels for group in kernel.groups.values()] == labels
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert list(plain.state_dict()) == [name for name in made.state_dict() if "linear_attention" not in name]
