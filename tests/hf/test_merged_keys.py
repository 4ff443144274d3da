"""Merged keys in place of an encoder's softmax: exact with enough of them, saved; those of a decoder are refused."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import transformers

import linattn
from linattn.feature_maps import FavorPlus, Taylor
from linattn.hf import from_pretrained, linearize_, restore_, save_pretrained
from linattn.kv_cache import MergedKV
from model_inputs import batch

IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(5))
ENOUGH = "window 2 + merged 16"
DECODERS = ("llama", "gpt2", "gemma3", "bert_decoder")


def outputs(model, **inputs):
    """The first output, without a graph."""
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("label", ["merged 16", ENOUGH])
def test_enough_merged_keys_leave_an_encoder_as_it_was(build, label):
    model, inputs = build("bert").double(), batch("bert")
    before = outputs(model, **inputs)
    linearize_(model, method=label)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(outputs(model, **inputs)[seen], before[seen], rtol=1e-11, atol=1e-11)
    assert label in repr(model)
    restore_(model)
    assert torch.equal(outputs(model, **inputs), before)


def test_every_layer_by_its_own_merged_keys(build, tmp_path):
    """Each as if it were that of all; the folder keeps both."""
    labels, inputs = ["window 2 + merged 3", "merged 2"], batch("bert")
    model = build("bert")
    report = linearize_(model, method=labels)
    assert [layer.feature_map for layer in report.layers] == labels
    made = outputs(model, **inputs)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert torch.equal(outputs(again, **inputs), made)
    restore_(model)
    linearize_(model, method=[MergedKV.parse(label) for label in labels])
    assert torch.equal(outputs(model, **inputs), made)


def test_the_encoder_of_an_encoder_decoder(build):
    """Its decoder keeps softmax, for which the report names the cache; a list gives it maps."""
    model, ids = build("bart"), {"input_ids": IDS, "decoder_input_ids": IDS}
    before = outputs(model, **ids)
    report = linearize_(model, method=MergedKV(4, 16, None))
    assert {row.module_name.split(".")[0] for row in report.replaced} == {"encoder"}
    assert {"it is causal, and a BoundedCache merges the keys of such layers"} < {row.reason for row in report.kept}
    torch.testing.assert_close(outputs(model, **ids), before, rtol=1e-4, atol=1e-5)
    restore_(model)
    numbers = [row.layer for row in report.layers if ".encoder_attn" not in row.module_name]
    methods = [ENOUGH if row.reason is None else "EluPlusOne" for row in report.layers if row.layer in numbers]
    linearize_(model, method=methods, layers=numbers)
    assert {row.feature_map for row in report.replaced} == {MergedKV(4, 16, None).label}


METHODS = {
    "a config": MergedKV(4, 6, 4),
    "without a window": MergedKV(None, 6, None),
    "text": "window 4 + merged 6 in 4 bits",
    "one for each layer": ["window 4 + merged 6", MergedKV(4, 6, 4)],
    "beside a map": ["Taylor(order=1)", "window 4 + merged 6"],
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_is_refused_before_any_pass_with_the_lines_to_write(language_model, family, method):
    model = language_model(family)
    model.register_forward_pre_hook(lambda *_: pytest.fail("a pass"))
    with pytest.raises(ValueError, match="is causal, and linearize_ merges keys of encoders alone") as told:
        linearize_(model, method=method)
    assert_as_it_was(model)
    model._forward_pre_hooks.clear()
    tokens = write(str(told.value), model, {"input_ids": IDS, "max_new_tokens": 12, "do_sample": False})
    assert tokens.shape[0] == 2


@pytest.mark.parametrize("kind", [lambda width: MergedKV(4, 6, None), lambda width: next(iter([MergedKV(4, 6, 4)]))])
def test_a_function_that_builds_merged_keys_is_refused_in_a_decoder(language_model, kind):
    model = language_model("llama")
    with pytest.raises(ValueError, match=r"BoundedCache\(model, config=linattn\.MergedKV\(window=4") as told:
        linearize_(model, method=kind, calibrate=iter([IDS]))
    assert_as_it_was(model)
    write(str(told.value), model, {"input_ids": IDS, "max_new_tokens": 2})
    kernels = iter([Taylor(8), MergedKV(4, 6, None)])
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn .* is causal"):
        linearize_(language_model("llama"), method=lambda width: next(kernels))


def test_a_base_model_is_called_with_the_cache(build):
    model = build("llama")
    with pytest.raises(ValueError, match=r"is causal.*\n.*\n    model\(\*\*inputs, past_key_values=cache\)") as told:
        linearize_(model, method=ENOUGH)
    write(str(told.value), model, {"input_ids": IDS})


def test_a_decoder_with_cross_attention_and_no_encoder(build):
    """Its other layers are no encoder's; a list with a map is refused at once too."""
    model = build("bart", head="ForCausalLM")
    for method in (ENOUGH, [ENOUGH] * 2):
        with pytest.raises(ValueError, match="is causal, and linearize_ merges keys of encoders alone") as told:
            linearize_(model, method=method)
        assert_as_it_was(model)
    write(str(told.value), model, {"input_ids": IDS, "max_new_tokens": 3})


def test_a_decoder_beside_an_encoder_is_refused_where_it_is_named(build):
    model = build("bart", head="ForConditionalGeneration")
    decoders = [number for number, name in enumerate_modules(model) if ".decoder." in name and "self_attn" in name]
    with pytest.raises(ValueError, match="is causal") as told:
        linearize_(model, method=ENOUGH, layers=decoders)
    assert "linattn.hf.EncoderDecoderStates(linattn.hf.BoundedCache(model, config=" in str(told.value)
    write(str(told.value), model, {"input_ids": IDS, "max_new_tokens": 3})


def test_folders_of_converted_decoders_are_refused_with_what_to_write(language_model, tmp_path):
    """Of earlier versions; a softmax model and a cache are what they hold."""
    model = language_model("llama")
    linearize_(model, method="EluPlusOne")
    save_pretrained(model, tmp_path / "folder")
    restore_(model)
    record = json.loads((tmp_path / "folder" / "linattn.json").read_text())
    for layer in record["layers"]:
        layer["kernel"] = {"feature_map": None, "window": 4, "num_merged": 6, "bits": 4}
    (tmp_path / "folder" / "linattn.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is causal, and linearize_ merges keys of encoders alone") as told:
        from_pretrained(tmp_path / "folder")
    names = {"linattn": linattn, "transformers": transformers}
    exec(inspect.cleandoc("\n".join(str(told.value).splitlines()[1:3])), names)
    cache = linattn.hf.BoundedCache(model, config=MergedKV(4, 6, 4, num_sinks=0))
    wanted = outputs(model, input_ids=IDS, past_key_values=cache)
    assert torch.equal(outputs(names["model"], input_ids=IDS, past_key_values=names["cache"]), wanted)


def test_what_merged_keys_have_not_is_refused(build):
    with pytest.raises(TypeError, match=r"one of these for each layer, or a function .*, got FavorPlus; write method="):
        linearize_(build("bert"), method=[FavorPlus(4, 8)] * 2)
    for options, words in (
        ({"method": ENOUGH, "num_features": 8}, "has no map, got num_features=8"),
        ({"method": ENOUGH, "calibrate": [IDS]}, "nothing to calibrate: window 2 [+] merged 16 takes no"),
        ({"method": [ENOUGH]}, "got 1 methods for the 2 layers to be replaced; give one for each, in order"),
        ({"method": [MergedKV(2, 3)] * 3}, "got 3 methods for the 2 layers to be replaced; give one for each"),
        ({"method": [ENOUGH, MergedKV(2, 3)], "layers": [1, 0]}, r"in ascending order, got layers=\[1, 0\]"),
        (
            {"method": lambda width: Taylor(width), "window": [2, 4], "layers": [1, 0]},
            r"got 2 windows .* layers=\[1, 0\]",
        ),
        ({"method": [ENOUGH] * 2, "window": 2}, "says its own window; leave window out"),
        ({"method": "window 2 + merged 4 in 9 bits"}, "bits must be from 2 to 8 in halves, .* got 9"),
        ({"method": "Expansion + window 2 + merged 4"}, "leave the map out, as in 'window 32 [+] merged 128'"),
    ):
        with pytest.raises(ValueError, match=words):
            linearize_(build("bert"), **options)


def assert_as_it_was(model):
    """Nothing of linattn is in a model that was refused."""
    assert model.config._attn_implementation == "sdpa"
    assert not [name for module in model.modules() for name in vars(module) if "linattn" in name]


def enumerate_modules(model):
    """Number and name of each attention module."""
    return [(row.layer, row.module_name) for row in linattn.hf.linearization.choose_layers(model).layers]


def write(message, model, inputs):
    """Run the two lines that an error tells; what the second gives."""
    first, second = (line.strip() for line in message.splitlines()[1:])
    names = {"linattn": linattn, "transformers": transformers, "model": model, "inputs": inputs}
    with torch.no_grad():
        exec(first, names)
        made = eval(second, names)
    assert names["cache"].get_seq_length() > 0
    return made
