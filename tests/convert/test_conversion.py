"""`convert_`: its stages, what it leaves in the model, what it refuses, and a run cut off goes on."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from converted import agreement, names, state, unchanged
from linattn.convert import ConvertConfig, convert_, course
from linattn.convert.running import run
from linattn.convert.stages import measure
from linattn.hf import from_pretrained, intercept, is_linearized, linearize_, restore_, save_pretrained

# Of the ticking clock, on which a step takes half a second and what belongs to it as much.
SECONDS = 8
CONFIG = ConvertConfig("LearnedExponential(num_features=8)", minutes=SECONDS / 60, learning_rate=1e-3)
EXACT_PART = "Expansion(num_centres=2) + window 4"


def count_linearizations(monkeypatch, calls):
    """Note the models that are linearized, and let none be restored."""
    monkeypatch.setattr(
        course,
        "linearize_",
        lambda model, *method, **options: calls.append(model) or linearize_(model, *method, **options),
    )
    monkeypatch.setattr(course, "restore_", None)


@pytest.mark.parametrize(
    ("written", "stages", "trainings"),
    [
        ("Expansion(num_centres=2)", ["unconverted", "calibrated", "converted"], ["distillation"]),
        (EXACT_PART, ["unconverted", "calibrated", "converted"], ["distillation"]),
        ("FavorPlus(num_features=8)", ["unconverted", "converted"], ["distillation"]),
        (
            "LearnedExponential(num_features=8)",
            ["unconverted", "calibrated", "converted"],
            ["transfer", "distillation"],
        ),
        (
            "Centred(LearnedExponential(num_features=8))",
            ["unconverted", "calibrated", "converted"],
            ["transfer", "distillation"],
        ),
    ],
)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_stages_and_trainings(build, batches, ticking, family, written, stages, trainings):
    model = build(family)
    teacher = build(family)
    found = convert_(model, batches, replace(CONFIG, feature_map=written))
    fitted = "LearnedExponential(" not in written[:19] and "Favor" not in written
    # A map that is fitted cannot attend causally before its fit.
    left_out = ["unconverted"] if family == "llama" and fitted else []
    assert names(found) == ["uniform", *[name for name in stages if name not in left_out]]
    assert [training.name for training in found.trainings] == trainings
    assert found.method == written
    assert (found.num_held_out, found.num_held_out_tokens) == (4, 48)
    assert not found.stopped
    for training in found.trainings:
        assert training.steps >= 3
        assert training.best_loss <= training.first_loss
    assert is_linearized(model)
    held_out = [batches[7], batches[15]]
    with torch.no_grad():
        exact, ours = ([run(one, batch) for batch in held_out] for one in (teacher, model))
    assert agreement(ours, exact) == found.result.agreement
    assert (found.stages[-1].agreement.divergence is not None) == (family == "llama")
    assert all(len(stage.layers) == 2 for stage in found.stages[1:])


@pytest.mark.parametrize("kept", ["unconverted", "calibrated", "converted"])
@pytest.mark.parametrize("written", [EXACT_PART, CONFIG.feature_map, "Centred(LearnedExponential(num_features=8))"])
def test_the_model_is_left_at_its_best_stage(build, batches, ticking, tmp_path, monkeypatch, written, kept):
    """Also when it is gone on with; linearized once, for stages are kernels, not linearizations."""
    measured, calls = {}, []

    def favouring(name, *args):
        measured[name] = measure(name, *args)
        return replace(
            measured[name], agreement=replace(measured[name].agreement, embedding_cosine=float(name == kept))
        )

    monkeypatch.setattr(course, "measure", favouring)
    count_linearizations(monkeypatch, calls)
    teacher, states = build("bert"), []
    for _ in range(2):
        model = build("bert")
        found = convert_(model, batches, replace(CONFIG, feature_map=written), work=tmp_path / "work")
        assert names(found) == ["uniform", "unconverted", "calibrated", "converted"]
        assert found.kept == found.result.name == kept
        assert calls.pop() is model
        assert not calls
        assert [row.layer for row in found.linearization.replaced] == [0, 1]
        assert (found.speed.batch_size, found.speed.num_tokens) == tuple(batches[0]["input_ids"].shape)
        assert len(found.speed.seconds) == len(found.speed.exact_seconds) == 3
        with torch.no_grad():
            exact, ours = ([run(one, batches[number]) for number in (7, 15)] for one in (teacher, model))
        assert agreement(ours, exact) == measured[kept].agreement
        assert not any(module.training for module in model.modules())
        states.append(state(model))
    assert unchanged(model, states[0])
    restore_(model)
    assert kept == "converted" or unchanged(model, state(teacher))


def test_every_stage_tells_how_far_it_is(build, batches):
    told = []
    config = replace(CONFIG, feature_map="Expansion(num_centres=2)", minutes=0)
    found = convert_(build("bert"), batches, config, measured=lambda *words: told.append(words))
    assert told == [(name, share) for name in ("exact", *names(found)) for share in (0.5, 1.0)]


@pytest.mark.parametrize(
    ("name", "written", "stages"),
    [
        ("transfer", CONFIG.feature_map, ["uniform", "unconverted"]),
        ("transfer", "Centred(LearnedExponential(num_features=8))", ["uniform", "unconverted", "calibrated"]),
        ("distil", "FavorPlus(num_features=8)", ["uniform", "unconverted"]),
        ("distil", EXACT_PART, ["uniform", "unconverted", "calibrated"]),
        ("distil", CONFIG.feature_map, ["uniform", "unconverted", "calibrated"]),
    ],
)
@pytest.mark.usefixtures("interruptible")
def test_a_training_without_a_step_is_not_named(build, batches, ticking, monkeypatch, name, written, stages):
    own = getattr(course, name)

    def interrupted(*args, **options):
        training = own(*args, **options)

        def validate():
            signal.raise_signal(signal.SIGINT)
            return training.validate()

        return replace(training, validate=validate)

    monkeypatch.setattr(course, name, interrupted)
    found = convert_(build("bert"), batches, replace(CONFIG, feature_map=written))
    assert found.stopped
    assert names(found) == stages
    done = {"transfer": [], "distil": ["transfer"] * ("Learned" in written)}[name]
    assert [training.name for training in found.trainings] == done


@pytest.mark.parametrize("family", ["gpt2", "modernbert", "vit"])
def test_other_families(build, batches, ticking, family):
    model = build(family)
    if family == "vit":
        draw = torch.Generator().manual_seed(0)
        batches = [{"pixel_values": torch.randn(2, 3, 16, 16, generator=draw)} for _ in range(16)]
    found = convert_(model, batches, CONFIG)
    assert names(found) == ["uniform", "unconverted", "calibrated", "converted"]
    assert found.stages[-1].agreement.token_cosine > found.stages[1].agreement.token_cosine
    if family == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight


def test_without_time_and_without_distillation(build, batches, ticking):
    assert names(convert_(build("bert"), batches, replace(CONFIG, minutes=0))) == ["uniform", "unconverted"]
    model, before = build("bert"), state(build("bert"))
    found = convert_(model, batches, replace(CONFIG, distil=False))
    assert names(found) == ["uniform", "unconverted", "calibrated"]
    assert [training.name for training in found.trainings] == ["transfer"]
    assert found.trainings[0].seconds >= SECONDS
    restore_(model)
    assert unchanged(model, before)
    found = convert_(model, batches, replace(CONFIG, feature_map="FavorPlus(num_features=8)", distil=False))
    assert (names(found), found.trainings) == (["uniform", "unconverted"], ())


def test_some_layers(build, batches, ticking):
    model = build("bert")
    found = convert_(model, batches, replace(CONFIG, layers=(1,)))
    assert [layer.layer for layer in found.linearization.replaced] == [1]
    assert [layer.reason for layer in found.linearization.kept] == ["not among `layers`"]
    assert [layer.layer for layer in found.stages[-1].layers] == ["encoder.layer.1.attention.self"]
    mixed = build("modernbert", num_hidden_layers=3, global_attn_every_n_layers=2, local_attention=64)
    found = convert_(mixed, batches, replace(CONFIG, minutes=0))
    assert [layer.layer for layer in found.linearization.replaced] == [0, 2]
    assert found.linearization.kept[0].reason.startswith("a sliding window of")


def test_layers_with_a_window_stay(build, batches, tmp_path, ticking):
    """The texts are longer than the window; of the three kinds of stage none touches it."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = build("gemma3", num_hidden_layers=3, sliding_window=4, layer_types=kinds)
    found = convert_(model, batches, CONFIG)
    assert [layer.layer for layer in found.linearization.replaced] == [1]
    assert [layer.reason[:28] for layer in found.linearization.kept] == ["a sliding window of 4 tokens"] * 2
    assert [layer.layer for layer in found.result.layers] == ["model.layers.1.self_attn"]
    save_pretrained(model, tmp_path / "saved")
    ids = batches[0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "saved")(ids)[0], model(ids)[0])


def test_the_baseline_averages_what_is_converted(build, batches):
    """A layer whose softmax stays keeps it in the baseline as well, however short the text is for its window."""
    model, other = build("llama", num_hidden_layers=3), build("llama", num_hidden_layers=3)
    found = convert_(model, batches, replace(CONFIG, minutes=0, layers=(1,)))

    def answer(call):
        return call.uniform() if call.layer == 1 else call.softmax()

    with torch.no_grad():
        held_out = [run(other, batch) for batch in (batches[7], batches[15])]
    with torch.no_grad(), intercept(other, answer):
        averaged = [run(other, batch) for batch in (batches[7], batches[15])]
    assert found.stages[0].agreement.divergence == pytest.approx(agreement(averaged, held_out).divergence, rel=1e-6)


def test_texts(build, tokenizer, paragraphs, tmp_path, ticking):
    config = replace(CONFIG, texts=("\n\n".join(paragraphs),), num_tokens=16)
    model = build("llama")
    found = convert_(model, tokenizer, config)
    assert found.num_held_out >= 2
    assert found.num_held_out_tokens < 16 * found.num_held_out
    save_pretrained(model, tmp_path / "saved", tokenizer=tokenizer)
    ids = torch.randint(3, 50, (2, 9))
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "saved")(ids)[0], model(ids)[0])


def test_texts_of_one_length(build, tokenizer, paragraphs):
    config = replace(CONFIG, texts=("\n\n".join(paragraphs),), num_tokens=16, min_tokens=16, minutes=0)
    found = convert_(build("llama"), tokenizer, config)
    assert found.num_held_out_tokens == 16 * found.num_held_out


def test_a_data_loader_and_batches_with_padding(build, padded, ticking):
    texts = [{name: x[row] for name, x in batch.items()} for batch in padded for row in range(2)]
    found = convert_(build("bert"), DataLoader(texts, batch_size=2), CONFIG)
    assert found == convert_(build("bert"), padded, CONFIG)
    assert found.num_held_out_tokens == sum(int(padded[number]["attention_mask"].sum()) for number in (7, 15))


def test_float64(build, batches, ticking):
    model = build("bert").double()
    convert_(model, batches, CONFIG)
    assert {weight.dtype for name, weight in model.named_parameters() if "linear_attention" not in name} == {
        torch.float64
    }


def test_what_it_leaves_in_the_model(build, batches, ticking):
    model = build("bert").train()
    frozen = model.embeddings.word_embeddings.weight.requires_grad_(False)
    before = frozen.clone()
    convert_(model, batches, CONFIG)
    assert not any(module.training for module in model.modules())
    assert torch.equal(frozen, before)
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == [
        "embeddings.word_embeddings.weight"
    ]
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "place", ["capture", "measure_uniform", "build_maps", "fit_maps", "measure", "transfer", "distil", "train"]
)
def test_after_an_error_the_model_is_what_it_was(build, batches, ticking, monkeypatch, place, error):
    model = build("bert").train()
    model.encoder.layer[0].train(False)
    modes = [module.training for module in model.modules()]
    before = state(model)
    calls = []
    own = getattr(course, place)

    def failing(*args, **options):
        calls.append(None)
        # Of what happens several times, the last: the model has changed by then.
        if len(calls) == {"measure": 3, "train": 2}.get(place, 1):
            raise error("broken")
        return own(*args, **options)

    monkeypatch.setattr(course, place, failing)
    with pytest.raises(error, match="broken"):
        convert_(model, batches, replace(CONFIG, feature_map="Centred(LearnedExponential(num_features=4))"))
    assert not is_linearized(model)
    assert unchanged(model, before)
    assert [module.training for module in model.modules()] == modes
    assert all(weight.grad is None for weight in model.parameters())


def test_a_gradient_that_is_not_finite(build, batches, ticking):
    model = build("bert")
    before = state(model)
    with pytest.raises(RuntimeError, match="is not finite"):
        convert_(model, batches, replace(CONFIG, learning_rate=1e30))
    assert not is_linearized(model)
    assert unchanged(model, before)


def test_an_interrupt_in_training_keeps_the_best(build, batches, ticking):
    model, told = build("bert"), []

    def stop(name, share, progress):
        told.append(progress.best)
        if share > 0.5:
            raise KeyboardInterrupt

    found = convert_(model, batches, CONFIG, notify=stop)
    assert found.stopped
    assert names(found) == ["uniform", "unconverted", "calibrated"]
    assert [training.name for training in found.trainings] == ["transfer"]
    assert found.trainings[0].best_loss == told[-1] < found.trainings[0].first_loss
    assert is_linearized(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"texts": ("a",)}, "both batches and texts were given"),
        ({"feature_map": "Performer"}, "there is no feature map 'Performer'"),
        ({"feature_map": "Taylor(order=2)", "num_features": 7}, "num_features|width"),
        ({"feature_map": "Balanced(Taylor)", "layers": (0, 9)}, "attention layers 0 to 1"),
    ],
)
def test_refusals(build, batches, tmp_path, changes, words):
    model = build("bert")
    before = state(model)
    with pytest.raises(ValueError, match=words):
        convert_(model, batches, replace(CONFIG, **changes), work=tmp_path / "work")
    assert unchanged(model, before)
    assert not is_linearized(model)
    # Otherwise the command with other words would be refused for what it finds there.
    assert not (tmp_path / "work").exists()


def test_models_and_texts_that_cannot_be_used(build, batches, tokenizer, paragraphs):
    with pytest.raises(ValueError, match=r"weights in torch.bfloat16, whose steps round away; load it with"):
        convert_(build("bert").bfloat16(), batches, CONFIG)
    coded = build("bert")
    coded.register_parameter("codes", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(ValueError, match=r"weights in torch.uint8, whose steps round away; load it with"):
        convert_(coded, batches, CONFIG)
    texts = ("\n\n".join(paragraphs),)
    with pytest.raises(ValueError, match="num_tokens is 512, and BertModel takes at most 32"):
        convert_(build("bert", max_position_embeddings=32), tokenizer, replace(CONFIG, texts=texts))
    with pytest.raises(ValueError, match=r"a tokenizer needs texts to read: give ConvertConfig\(texts="):
        convert_(build("bert"), tokenizer, CONFIG)
    with pytest.raises(ValueError, match="got 15 batches"):
        convert_(build("bert"), batches[1:], CONFIG)
    linear = build("bert")
    linearize_(linear, method="Taylor(order=1)")
    with pytest.raises(ValueError, match=r"BertModel is linearized already; call linattn.hf.restore_\(model\) first"):
        convert_(linear, batches, CONFIG)
    assert is_linearized(linear)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda batch: batch["input_ids"], TypeError, "batch 9 is or holds Tensor"),
        (lambda batch: {**batch, "use_cache": True}, TypeError, r"batch 9 is or holds \['use_cache'\]"),
        (lambda batch: {**batch, "labels": batch["input_ids"]}, ValueError, "batch 9 holds labels"),
        (
            lambda batch: {**batch, "attention_mask": torch.ones(2, 1, 12, 12)},
            ValueError,
            r"batch 9 holds an attention_mask \(2, 1, 12, 12\), wanted \(B, L\)",
        ),
        (lambda batch: {**batch, "attention_mask": torch.eye(2)[:, :1]}, ValueError, "batch 9 holds a text without"),
        (lambda batch: {name: x[:, :0] for name, x in batch.items()}, ValueError, "batch 9 holds a text without"),
        (lambda batch: {name: x[:0] for name, x in batch.items()}, ValueError, "batch 9 holds a text without tokens"),
    ],
)
def test_batches_that_are_none(build, batches, change, error, words):
    """Told before anything is computed."""
    changed = [change(batch) if number == 9 else batch for number, batch in enumerate(batches)]
    with pytest.raises(error, match=words):
        convert_(build("bert"), changed, CONFIG)


def test_the_model_within_a_compiled_one_and_a_folder_that_is_named(build, batches, tmp_path):
    model, config = build("bert"), ConvertConfig("Taylor(order=1)", minutes=0)
    made = convert_(torch.compile(model, backend="eager"), batches, config, work=str(tmp_path / "work"))
    assert made == convert_(build("bert"), batches, config)
    assert is_linearized(model)
    assert (tmp_path / "work").is_dir()
    with pytest.raises(TypeError, match="a transformers model is wanted, got NoneType"):
        convert_(None, batches, config)


def test_a_method_for_each_layer(build, batches):
    model, labels = build("bert"), ("Taylor(order=1)", "FavorPlus(num_features=8)")
    found = convert_(model, batches, ConvertConfig(labels, minutes=0))
    assert found.method == "; ".join(labels)
    maps = [layer.attention.self.linear_attention.feature_map for layer in model.encoder.layer]
    assert [type(feature_map).__name__ for feature_map in maps] == ["Taylor", "FavorPlus"]
    with pytest.raises(ValueError, match="got 3 methods for the 2 layers to convert; give one for each or for all"):
        convert_(build("bert"), batches, ConvertConfig((*labels, "Taylor"), minutes=0))
