"""A model whose layers attend by merged keys, without a map: exact with enough of them, saved, streamed, refused."""

from __future__ import annotations

import pytest
import torch

from linattn.convert import ConvertConfig, convert_
from linattn.feature_maps import FavorPlus
from linattn.hf import StateCache, from_pretrained, linearize_, restore_, save_pretrained
from linattn.kv_cache import MergedKV
from model_inputs import LANGUAGE_HEADS, OPTIONS, batch

IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(5))
ENOUGH = "window 2 + merged 16"


def outputs(model, **inputs):
    """The first output, without a graph."""
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_enough_merged_keys_leave_a_language_model_as_it_was(build, family):
    model = build(family, head=LANGUAGE_HEADS[family], **OPTIONS.get(family, {})).double()
    before = outputs(model, input_ids=IDS, use_cache=False)
    text = model.generate(IDS, max_new_tokens=5, do_sample=False)
    report = linearize_(model, method=ENOUGH, layers=range(2))
    assert [layer.feature_map for layer in report.layers] == [ENOUGH] * 2
    assert "window 2 + merged 16" in repr(model)
    torch.testing.assert_close(outputs(model, input_ids=IDS, use_cache=False), before, rtol=1e-11, atol=1e-11)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), text)
    restore_(model)
    assert torch.equal(outputs(model, input_ids=IDS, use_cache=False), before)


@pytest.mark.parametrize("label", ["merged 16", ENOUGH])
def test_enough_merged_keys_leave_an_encoder_as_it_was(build, label):
    model, inputs = build("bert").double(), batch("bert")
    before = outputs(model, **inputs)
    linearize_(model, method=label)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(outputs(model, **inputs)[seen], before[seen], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("label", ["window 2 + merged 3", "window 2 + merged 3 in 8 bits"])
def test_the_cache_of_merged_keys_does_not_grow(build, label):
    model = build("llama", head=LANGUAGE_HEADS["llama"])
    linearize_(model, method=label)
    cache, sizes = StateCache(model), []
    for t in range(11):
        outputs(model, input_ids=IDS[:, t : t + 1], past_key_values=cache)
        sizes.append(cache.num_bytes)
    assert max(sizes[5:]) == max(sizes)
    beams = model.generate(IDS, max_new_tokens=4, num_beams=3, do_sample=False)
    assert beams.shape == (2, 15)


@pytest.mark.parametrize("label", ["window 3 + merged 2", "window 3 + merged 2 in 4 bits"])
def test_merged_keys_are_saved_and_loaded(build, tmp_path, label):
    model = build("llama", head=LANGUAGE_HEADS["llama"])
    linearize_(model, method=label)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert again.model.layers[1].self_attn.linear_attention.summary == label
    assert torch.equal(outputs(again, input_ids=IDS), outputs(model, input_ids=IDS))


def test_every_layer_by_its_own_written_form(build, tmp_path):
    """Each as if it were that of all; the folder and the cache keep both."""
    labels = ["window 2 + merged 3", "window 4 + merged 2 in 8 bits"]
    model = build("llama", head=LANGUAGE_HEADS["llama"])
    report = linearize_(model, method=labels)
    assert [layer.feature_map for layer in report.layers] == labels
    attentions = [layer.self_attn.linear_attention for layer in model.model.layers]
    assert [attention.summary for attention in attentions] == labels
    found = outputs(model, input_ids=IDS, use_cache=False)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert torch.equal(outputs(again, input_ids=IDS, use_cache=False), found)
    cache = StateCache(again)
    steps = [outputs(again, input_ids=IDS[:, t : t + 1], past_key_values=cache) for t in range(11)]
    torch.testing.assert_close(torch.cat(steps, 1), found, rtol=2e-4, atol=2e-4)
    restore_(model)
    linearize_(model, method=[MergedKV.parse(label) for label in labels])
    assert torch.equal(outputs(model, input_ids=IDS, use_cache=False), found)


def test_what_merged_keys_have_not_is_refused(build):
    with pytest.raises(TypeError, match=r"one of these for each layer, or a function .*, got FavorPlus; write method="):
        linearize_(build("llama"), method=[FavorPlus(4, 8)] * 2)
    for options, words in (
        ({"method": ENOUGH, "num_features": 8}, "has no map, got num_features=8"),
        ({"method": ENOUGH, "calibrate": [IDS]}, "nothing to calibrate: window 2 [+] merged 16 takes no"),
        ({"method": "merged 4"}, "give window too"),
        ({"method": [ENOUGH]}, "got 1 methods for the 2 layers to be replaced; give one for each, in order"),
        ({"method": [MergedKV(2, 3)] * 3}, "got 3 methods for the 2 layers to be replaced; give one for each"),
        ({"method": FavorPlus, "window": [2]}, "got 1 windows for the 2 layers to be replaced"),
        ({"method": [ENOUGH] * 2, "window": 2}, "says its own window; leave window out"),
        ({"method": "window 2 + merged 4 in 3 bits"}, "bits must be 2, 4, 8 or None, got 3"),
        ({"method": "Expansion + window 2 + merged 4"}, "leave the map out, as in 'window 32 [+] merged 128'"),
    ):
        with pytest.raises(ValueError, match=words):
            linearize_(build("llama"), **options)


def test_a_conversion_takes_merged_keys(build):
    """Named as --map is: nothing is fitted, and with enough of them nothing is lost."""
    batches = [{"input_ids": IDS[:1]} for _ in range(16)]
    model = build("bert").double()
    found = convert_(model, batches, ConvertConfig("merged 16", minutes=0))
    assert found.method == "merged 16"
    assert [stage.name for stage in found.stages] == ["uniform", "unconverted"]
    assert all(layer.error < 1e-5 for layer in found.result.layers)


def test_a_conversion_takes_a_method_for_each_layer(build):
    batches = [{"input_ids": IDS[:1]} for _ in range(16)]
    model, labels = build("bert").double(), ("merged 16", "merged 2")
    found = convert_(model, batches, ConvertConfig(labels, minutes=0))
    assert found.method == "merged 16; merged 2"
    assert [layer.feature_map for layer in found.linearization.layers] == list(labels)
    first, second = found.result.layers
    assert first.error < 1e-5 < second.error
    with pytest.raises(ValueError, match="got 3 methods for the 2 layers to be converted; give one for each, in order"):
        convert_(build("bert").double(), batches, ConvertConfig((*labels, "merged 4"), minutes=0))
    with pytest.raises(ValueError, match=r"must name a method, got \(\)"):
        ConvertConfig(())
