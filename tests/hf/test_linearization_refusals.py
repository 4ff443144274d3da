"""What cannot be linearized, or asked of a linearized model, is refused by name and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from linattn import MergedKV
from linattn.feature_maps import EluPlusOne, FavorPlus, Relu
from linattn.hf import BoundedCache, intercept, is_linearized, linearize_, restore_
from linattn.hf.linearization import choose_layers
from model_inputs import batch

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
FOUR = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("family", "options", "inputs", "words"),
    [
        ("mistral", {"sliding_window": 3}, {}, "sliding window"),
        ("modernbert", {"local_attention": 4}, {}, "sliding window"),
        ("llama", {}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "use_cache": False}, "packed"),
        ("llama", {}, {"attention_mask": FOUR}, "4-D mask"),
    ],
)
def test_inexpressible_calls(build, family, options, inputs, words):
    model = build(family, **options)
    linearize_(model, method="EluPlusOne", layers=range(2))
    with pytest.raises(ValueError, match=words), torch.no_grad():
        model(input_ids=IDS, **inputs)


def test_dropout_in_training(build):
    model = build("bert").train()
    linearize_(model, method="EluPlusOne")
    with pytest.raises(ValueError, match=r"dropout of 0\.1.*load the model with attention dropout 0"):
        model(input_ids=IDS)
    silent = build("bert", attention_probs_dropout_prob=0.0).train()
    linearize_(silent, method="EluPlusOne")
    assert silent(input_ids=IDS)[0].isfinite().all()


@pytest.mark.parametrize("family", ["bloom", "mpnet"])
def test_architectures_that_ignore_the_interface(build, family):
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"does not take its attention.*choose a model that does"):
        linearize_(model, method="EluPlusOne")
    assert model.config._attn_implementation == before


def test_layers_with_a_window_are_left_unless_named(build):
    model = build("modernbert")
    report = linearize_(model, method="EluPlusOne")
    assert [row.layer for row in report.replaced] == [0]
    assert report.kept[0].reason.startswith("a sliding window of 65 tokens, already linear in length; name it")
    with pytest.raises(ValueError, match=r"no layer of MistralModel would be replaced: a sliding window of 4096"):
        linearize_(build("mistral"), method="EluPlusOne")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": None}, TypeError, "a function that builds a map from a head width, got NoneType"),
        ({"method": MergedKV(32, 96), "window": 32}, ValueError, "says its own window; leave window out"),
        ({"method": ["EluPlusOne", None]}, TypeError, "a function that builds a map from a head width, got NoneType"),
        ({"method": "EluPlusOne", "layers": [2]}, ValueError, r"has attention layers 0 to 1, got \[2\]"),
        ({"method": "EluPlusOne", "layers": 0}, ValueError, r"layers must be numbers .*, as in \[0, 2\], .* got 0"),
        ({"method": "EluPlusOne", "layers": "1"}, ValueError, r"layers must be numbers .*, got '1'"),
        ({"method": "EluPlusOne", "layers": []}, ValueError, "no layer of BertModel would be replaced"),
        ({"method": "FavorPlus"}, ValueError, "FavorPlus needs a number of features"),
        ({"method": "Softplus"}, ValueError, "there is no feature map 'Softplus'"),
        ({"method": "Relu + window 2"}, ValueError, "cannot share a normaliser"),
        ({"method": FavorPlus(8, 16)}, TypeError, "got FavorPlus; write method=lambda head_dim"),
        ({"method": lambda head_dim: "Relu"}, TypeError, r"by a linattn.*FeatureMap or by a linattn.MergedKV, got str"),
        ({"method": lambda head_dim: MergedKV(4, 8), "window": 4}, ValueError, "has its own window, got window=4"),
        (
            {"method": lambda head_dim: FavorPlus(8, 16), "window": "4"},
            TypeError,
            "window must be an integer or None, got",
        ),
        ({"method": "EluPlusOne", "example": IDS}, TypeError, r"example must be a mapping .*'input_ids'.* got Tensor"),
        ({"method": lambda head_dim: Relu(4)}, ValueError, r"\(layer 0\) cannot attend by Relu.*head_dim=4"),
    ],
)
def test_what_is_no_map_or_layer(build, options, error, words):
    model = build("bert")
    before = model.config._attn_implementation
    with pytest.raises(error, match=words):
        linearize_(model, **options)
    assert model.config._attn_implementation == before
    linearize_(model, method=EluPlusOne)


@pytest.mark.parametrize(
    ("feature_map", "words"),
    [
        ("Centred(Taylor)", r"layers.0.self_attn \(layer 0\) cannot attend by Centred\(Taylor\): .*fit"),
        ("Expansion", r"Expansion would take centres from all tokens.*call fit\(query, key\)"),
    ],
)
def test_maps_that_learn_from_the_call_are_refused_early_where_causal(build, feature_map, words):
    with pytest.raises(ValueError, match=words):
        linearize_(build("llama"), method=feature_map)
    linearize_(build("bert"), method=feature_map)


@pytest.mark.parametrize("family", ["bart", "whisper"])
@pytest.mark.parametrize(
    ("feature_map", "words"),
    [
        ("merged 8", "its queries are a decoder's and its keys another text's"),
        ("window 4 + merged 8", "its queries are a decoder's and its keys another text's"),
        ("FavorPlus(num_features=16) + window 8", "its queries are a decoder's and its keys another text's"),
        ("Expansion(num_centres=4)", "take centres from all tokens"),
        ("Centred(FavorPlus(num_features=16))", "take query_mean and key_mean from all tokens"),
    ],
)
def test_what_learns_from_all_queries_is_refused_where_a_decoder_reads_another_text(build, family, feature_map, words):
    """An earlier token would learn of later ones; a map alone does not."""
    model = build(family)
    crossed = [row.layer for row in choose_layers(model).kept]
    assert crossed
    with pytest.raises(ValueError, match=words):
        linearize_(model, method=feature_map, layers=crossed)
    linearize_(model, method="FavorPlus(num_features=16)", layers=crossed)


@pytest.mark.parametrize(
    ("method", "words"),
    [("Expansion(num_centres=4)", "leak the future.*calibrate=batches"), (MergedKV(None, 6), "give window too")],
)
def test_causal_masks_count_where_a_module_says_nothing(method, words):
    """As in CLIP's text encoder: what every call would refuse is refused at once, and what a call takes is taken."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = CLIPTextModel(CLIPTextConfig(**sizes, vocab_size=64, eos_token_id=2)).eval()
    with pytest.raises(ValueError, match=words):
        linearize_(model, method)
    assert not is_linearized(model)
    linearize_(model, "FavorPlus(num_features=8)")
    with torch.no_grad():
        before, after = model(IDS).last_hidden_state, model(IDS[:, :4]).last_hidden_state
    torch.testing.assert_close(before[:, :4], after, rtol=1e-4, atol=1e-4)


def test_once_and_only_once(build, exact):
    model = build("bert")
    with pytest.raises(ValueError, match="is not linearized; give the model that linearize_ was given"):
        restore_(model)
    linearize_(model, method="EluPlusOne")
    with pytest.raises(ValueError, match=r"linearized already; call restore_\(model\) first"):
        linearize_(model, method="EluPlusOne")
    with pytest.raises(TypeError, match="a transformers model is wanted, got BertEncoder"):
        restore_(model.encoder)
    restore_(model)
    with intercept(model, exact), pytest.raises(ValueError, match="being intercepted; leave the block"):
        linearize_(model, method="EluPlusOne")
    language_model = build("llama")
    # Before the first cache of a model and after.
    for _ in range(2):
        with intercept(language_model, exact), pytest.raises(ValueError, match="being intercepted; leave the block"):
            BoundedCache(language_model)
        BoundedCache(language_model)


def test_softmax_layers_honour_what_kernels_cannot(build):
    """A window reaches the softmax layers of a hybrid."""
    window = build("qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1, num_hidden_layers=3)
    window.double()
    inputs = batch("qwen2")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        own = window(**inputs)[0][real]
        linearize_(window, method="FavorPlus(num_features=8) + window 8")
        # The first layer's kernel has a window over the whole text: exact. The others have the model's own.
        assert (window(**inputs)[0][real] - own).abs().max() <= 1e-12 * own.abs().max()
