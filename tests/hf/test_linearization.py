"""What `linearize_` reports, where the maps live, and what a hybrid does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from linattn.feature_maps import Centred, FavorPlus, Taylor
from linattn.hf import capture, linearize_, restore_
from model_inputs import batch, real

# Two float32 evaluations of the same sums: 2**-24 a rounding, some hundred roundings in sequence, outputs of order 1.
CLOSE = 1e-5
FAVOR = "FavorPlus(num_features=16)"


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def test_report(build):
    model = build("llama", num_hidden_layers=3)
    report = linearize_(model, method="favorplus(num_features=16)", layers=[0, 2])
    assert [(row.layer, row.module_name) for row in report.replaced] == [
        (0, "layers.0.self_attn"),
        (2, "layers.2.self_attn"),
    ]
    assert {row.feature_map for row in report.replaced} == {FAVOR}
    assert [(row.layer, row.reason) for row in report.kept] == [(1, "not among `layers`")]
    assert str(report).splitlines()[1] == "  1 layers.1.self_attn: softmax (not among `layers`)"


def test_maps_belong_to_the_model(build):
    model = build("bert")
    before = set(model.state_dict())
    linearize_(model, method=FAVOR)
    added = set(model.state_dict()) - before
    places = [f"encoder.layer.{n}.attention.self.linear_attention.feature_map" for n in (0, 1)]
    assert added == {f"{place}.{tensor}" for place in places for tensor in ("projection", "seed")}
    maps = [model.get_submodule(place) for place in places]
    assert [int(found.seed) for found in maps] == [0, 1]  # every layer draws for itself
    twin = build("bert")
    linearize_(twin, method=FAVOR, seed=7)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(twin, batch("bert")), run(model, batch("bert")))
    restore_(model)
    assert set(model.state_dict()) == before
    assert not any("linattn" in name for name in vars(model))


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_every_configuration_names_its_own_implementation_again(build, own):
    model = build("bart")
    model.set_attn_implementation(own)
    linearize_(model, method=FAVOR)
    restore_(model)
    assert {part.config._attn_implementation for part in (model, model.encoder, model.decoder)} == {own}


def test_saved_and_loaded(build, tmp_path):
    model, inputs = build("llama"), batch("llama")
    linearize_(model, method=lambda head_dim: FavorPlus(head_dim, 16, seed=5))
    ours = run(model, inputs)
    weights = model.state_dict()
    restore_(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    linearize_(loaded, method=FAVOR)
    loaded.load_state_dict(weights)
    assert torch.equal(run(loaded, inputs), ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(build, dtype):
    """Features and sums stay in float32: the loss is that of the rounded weights and activations."""
    model, inputs = build("llama"), batch("llama")
    linearize_(model, method=FAVOR)
    maps = [module for name, module in model.named_modules() if name.endswith("feature_map")]
    assert run(model.to(dtype), inputs)[real(inputs)].isfinite().all()
    assert {found.projection.dtype for found in maps} == {torch.float64}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_live_on_their_own(build, duplicate):
    model, inputs = build("llama"), batch("llama")
    own = run(model, inputs)
    linearize_(model, method=FAVOR)
    ours, twin = run(model, inputs), duplicate(model)
    restore_(model)
    assert torch.equal(run(twin, inputs), ours)
    restore_(twin)
    assert torch.equal(run(twin, inputs), own)


def test_a_function_builds_one_map_per_layer(build):
    widths = []

    def one(head_dim):
        widths.append(head_dim)
        return Taylor(head_dim, order=1)

    report = linearize_(build("llama", num_hidden_layers=3), method=one, layers=[0, 2])
    assert widths == [8, 8]
    assert report.replaced[0].feature_map.startswith("Taylor(head_dim=8, order=1")


def test_fitted_maps_serve_causal_layers(build):
    model, inputs = build("llama"), batch("llama")
    calls = iter(capture(model, inputs).calls)

    def fitted(head_dim):
        call = next(calls)
        return Centred(FavorPlus(head_dim, 16)).fit(call.query, call.key)

    linearize_(model, method=fitted)
    assert run(model, inputs)[real(inputs)].isfinite().all()


def test_the_exact_part_of_a_method(build):
    """Windows as wide as the text make every map exact."""
    model, inputs = build("llama"), {"input_ids": torch.randint(3, 64, (2, 8))}
    own = run(model, inputs)
    linearize_(model, method=f"{FAVOR} + window 8")
    assert (run(model, inputs) - own).abs().max() <= CLOSE * own.abs().max()


def test_learned_maps_train_with_the_model(build):
    model = build("bert")
    linearize_(model, method="LearnedExponential", num_features=8)
    loss = model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.square().sum()
    loss.backward()
    for number, layer in enumerate(model.encoder.layer):
        weights = dict(layer.attention.self.linear_attention.feature_map.named_parameters())
        assert weights
        assert all(weight.grad is not None for weight in weights.values()), f"layer {number}"


def test_gradients_reach_the_model(build):
    model = build("llama")
    linearize_(model, method="Taylor(order=2)")
    model(**batch("llama"))[0].sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("inputs", [batch("llama"), {"input_ids": torch.arange(3, 19).view(2, 8)}])
def test_softmax_layers_stay_exact(build, inputs):
    """A hybrid whose one kernel is exact (its window covers the text) is the model itself."""
    model = build("llama", num_hidden_layers=3)
    own = run(model, inputs)
    linearize_(model, method=f"{FAVOR} + window 16", layers=[1])
    ours = run(model, inputs)
    assert (ours - own)[real(inputs)].abs().max() <= CLOSE * own[real(inputs)].abs().max()


def test_softmax_layers_see_the_cached_keys(build):
    model, ids = build("llama", num_hidden_layers=3), torch.arange(3, 19).view(2, 8)
    linearize_(model, method="Taylor(order=2)", layers=[1])
    whole = run(model, {"input_ids": ids})
    with torch.no_grad():
        first = model(input_ids=ids[:, :5])
        second = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values)
    assert (second[0] - whole[:, 5:]).abs().max() <= CLOSE * whole.abs().max()


def test_softmax_layers_drop_weights_in_training(build):
    model = build("llama", attention_dropout=0.5).train()
    linearize_(model, method="EluPlusOne", layers=[1])
    model.layers[1].self_attn.attention_dropout = 0.0
    inputs = {"input_ids": torch.arange(3, 19).view(2, 8)}
    assert not torch.equal(run(model, inputs), run(model, inputs))
