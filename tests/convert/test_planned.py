"""Conversions for a target error: a method for each head, planned and fitted on the calibration texts."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from linattn.convert import DEFAULT_MAP, ConvertConfig, convert_, course
from linattn.convert.calibration import make_plans
from linattn.convert.card import method_table, model_card
from linattn.convert.stages import measure
from linattn.hf import LayerAttention, is_linearized, linearize_, restore_
from linattn.planning.plans import EXACT

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def _exact_attention_is_dear(monkeypatch):
    """On texts as short as these exact attention takes the fewest operations; others are to be used all the same."""
    monkeypatch.setattr("linattn.planning.choosing.exact_flops_per_token", lambda *_, **__: 10**9)


def scaled(model):
    """Random weights give nearly uniform attention; larger ones tell the methods apart."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(20.0)
    return model.eval()


@pytest.fixture
def bert():
    torch.manual_seed(0)
    return scaled(BertModel(BertConfig(**SIZES)))


def batches(padded=False):
    """Sixteen batches of two rows of 40 tokens; where padded, the second row of each is shorter."""
    draw, found = torch.Generator().manual_seed(1), []
    for number in range(16):
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[1, 30 + number % 3 :] = 0 if padded else 1
        ids = torch.randint(3, 64, (2, 40), generator=draw)
        found.append({"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask})
    return found


def config(target=0.2, **options):
    return ConvertConfig(**{"target_error": target, "minutes": 0, "even_if_slower": True, **options})


def kernels(model):
    return [part for part in model.modules() if isinstance(part, LayerAttention)]


@pytest.mark.parametrize("minutes", [0, 0.5])
def test_every_head_has_the_method_of_its_plan(bert, ticking, minutes, monkeypatch):
    plans = []
    monkeypatch.setattr(course, "make_plans", lambda *a, **k: plans.extend(make_plans(*a, **k)) or plans)
    # Not the maps as they learn from each call, which may be better.
    monkeypatch.setattr(course, "best", lambda stages: stages[-1])
    made = convert_(bert, batches(padded=True), config(minutes=minutes))
    assert made.method == "planned for an error of 0.2"
    assert made.heads == tuple(tuple(head.method for head in plan.heads) for plan in plans)
    methods = [method for layer in made.heads for method in layer]
    assert len(set(methods)) > 1
    assert any(method != EXACT for method in methods)
    for kernel, plan in zip(kernels(bert), plans, strict=True):
        assert kernel.plan.heads == plan.heads
        for feature_map, label in zip(kernel.maps, plan.fitted, strict=True):
            assert feature_map.state_dict().keys() == plan.fitted[label].keys()
            assert all(torch.equal(x, plan.fitted[label][name]) for name, x in feature_map.state_dict().items())
    names = ["uniform", "unconverted", "calibrated", *(["converted"] if minutes else [])]
    assert [stage.name for stage in made.stages] == names
    assert [layer.layer for layer in made.stages[-1].layers] == [row.module_name for row in made.linearization.replaced]
    assert all(layer.error < layer.uniform_error for layer in made.stages[2].layers)
    if minutes:
        assert [one.name for one in made.trainings] == ["distillation"]
        assert made.trainings[0].best_loss < made.trainings[0].first_loss


@pytest.mark.parametrize("kept", ["unconverted", "calibrated", "converted"])
def test_a_planned_model_is_left_at_its_best_stage(bert, ticking, kept, monkeypatch):
    outputs = {}

    def measured(name, model, texts, *args):
        found = measure(name, model, texts, *args)
        with torch.no_grad():
            outputs[name] = model(**texts[0])[0]
        return replace(found, agreement=replace(found.agreement, embedding_cosine=float(name == kept)))

    monkeypatch.setattr(course, "measure", measured)
    texts = batches()
    made = convert_(bert, texts, config(minutes=0.5))
    assert made.kept == kept
    assert [stage.name for stage in made.stages] == ["uniform", "unconverted", "calibrated", "converted"]
    # Of every eight batches the last is held out.
    with torch.no_grad():
        ours = bert(**texts[7])[0]
    assert [name for name, theirs in outputs.items() if torch.equal(ours, theirs)] == [kept]


def test_a_lower_target_gives_no_larger_error(bert):
    errors = []
    for target in (0.8, 0.2, 0.02, 1e-9):
        made = convert_(bert, batches(), config(target))
        errors.append([layer.error for layer in made.stages[-1].layers])
        restore_(bert)
    for worse, better in pairwise(errors):
        # The second layer reads what the first made of the text: only the first layer's inputs are the same.
        assert better[0] <= worse[0]
    assert errors[0][0] > errors[2][0]
    # Nothing meets the last target: exact attention, to the rounding of float32.
    assert max(errors[-1]) < 1e-5


def test_plans_are_made_on_the_longest_texts_without_their_padding(bert):
    """Row 0 of each padded batch is whole: what the padding of others holds must not enter."""
    texts, probe = batches(padded=True)[:3], linearize_(bert, feature_map="Exponential")
    restore_(bert)
    made = make_plans(probe.replaced, bert, texts, target_error=0.2, even_if_slower=True)
    changed = [
        {**text, "input_ids": torch.where(text["attention_mask"].bool(), text["input_ids"], 7)} for text in texts
    ]
    again = make_plans(probe.replaced, bert, changed, target_error=0.2, even_if_slower=True)
    assert [plan.heads for plan in made] == [plan.heads for plan in again]
    assert {plan.num_tokens for plan in made} == {40}
    for ours, theirs in zip(made, again, strict=True):
        assert ours.fitted
        for label, tensors in ours.fitted.items():
            assert all(torch.equal(x, theirs.fitted[label][name]) for name, x in tensors.items())


def test_a_decoder_is_planned_and_generates():
    sizes = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = scaled(LlamaForCausalLM(LlamaConfig(**sizes)))
    made = convert_(model, batches(), config(0.5, even_if_slower=True))
    assert [stage.name for stage in made.stages] == ["uniform", "calibrated"]
    assert any(method != EXACT for layer in made.heads for method in layer)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    ids = batches()[0]["input_ids"]
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_work_is_gone_on_with_and_other_targets_are_refused(bert, tmp_path, monkeypatch):
    first = convert_(bert, batches(), config(), work=tmp_path)
    restore_(bert)
    monkeypatch.setattr(course, "make_plans", None)
    again = convert_(bert, batches(), config(), work=tmp_path)
    assert asdict(replace(again, speed=None, paying=None)) == asdict(replace(first, speed=None, paying=None))
    restore_(bert)
    with pytest.raises(ValueError, match=r"other settings \(feature_map: .*target_error: 0.2, now 0.3\)"):
        convert_(bert, batches(), config(0.3), work=tmp_path)
    assert not is_linearized(bert)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_map": DEFAULT_MAP, "target_error": 0.1}, "chooses a method for each head, and feature_map="),
        ({"num_features": 8, "target_error": 0.1}, "num_features=8 one for all; give one or the other"),
        ({"target_error": 0.0}, "target_error must be a positive number, got 0.0"),
        ({"target_error": float("nan")}, "target_error must be a positive number, got nan"),
    ],
)
def test_refused_settings(options, words):
    with pytest.raises(ValueError, match=words):
        ConvertConfig(**options)


def test_without_a_target_one_method_serves_all_heads(bert):
    made = convert_(bert, batches(), ConvertConfig(minutes=0, even_if_slower=True))
    assert made.method == DEFAULT_MAP
    assert made.heads == ()
    assert "The methods of the heads" not in model_card(made, "tiny")


def test_the_report_counts_methods(bert):
    heads = (("Taylor", EXACT, "Relu", "Relu"), (EXACT, "Relu", "Relu", "Taylor"))
    made = replace(convert_(bert, batches(), config()), heads=heads)
    assert method_table(made).rows == ((EXACT, "2"), ("Relu", "4"), ("Taylor", "2"))
    card = model_card(made, "tiny")
    words = "attend by a method for each head, planned for an error of 0.2: 2 of 8 heads stay exact, which is quadratic"
    assert f"2 of 2 attention layers {words}" in card
    assert "| exact | 2 |\n| Relu | 4 |\n| Taylor | 2 |" in card
