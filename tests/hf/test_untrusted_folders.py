"""A folder that was broken, or made by somebody else, is refused by one error that names the file; nothing runs."""

from __future__ import annotations

import json
import re
import resource
import shutil
import struct

import pytest
from transformers.integrations import hub_kernels

from linattn.hf import from_pretrained
from linattn.methods.map_records import check_size

DEEP = "[" * 200_000
DIGITS = "9" * 6000


@pytest.fixture(autouse=True)
def no_fetching(monkeypatch):
    """Whoever asks a hub for code fails."""

    def fetch(*_, **__):
        raise AssertionError("a hub was asked for a kernel")

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", fetch)
    monkeypatch.setattr(hub_kernels, "lazy_load_kernel", fetch)


@pytest.fixture(autouse=True)
def little_memory():
    """What asks for 8 GB more than there is in use fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**33, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def change(path, edit) -> None:
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def refused(folder, words):
    with pytest.raises(ValueError, match=words) as caught:
        from_pretrained(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["kernels-community/flash-attn", "flash_attention_2", {"": "a/b"}, ["a/b"], 3])
def test_kernels_of_a_hub(folder, name, value):
    change(folder / "config.json", lambda found: {**found, name: value})
    refused(folder, rf"config\.json: {name} is .*code or files from elsewhere; remove it")


def test_kernels_of_a_hub_in_a_part(folder):
    change(folder / "config.json", lambda found: {**found, "parts": [{"attn_implementation": "a/b"}]})
    refused(folder, r"config\.json: attn_implementation is 'a/b'")


@pytest.mark.parametrize("name", ["transformers_weights", "configuration_files"])
def test_files_that_a_configuration_names(folder, name):
    change(folder / "config.json", lambda found: {**found, name: "../other"})
    refused(folder, rf"config\.json: {name} is '\.\./other'")


def test_adapters(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "../other"}')
    refused(folder, r"adapter_config\.json names another folder for the weights")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", "", "x.bin", 3, None])
def test_weights_outside_the_folder(folder, name):
    shutil.copy(folder / "model.safetensors", folder.parent / "x.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, r"index\.json names .* no file of weights in the same folder")


@pytest.mark.parametrize("name", ["linattn.json", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DEEP, "it is nested too deeply"),
        ('{"a":' * 200_000, "it is nested too deeply"),
        (f'{{"version": {DIGITS}}}', "it is no JSON .*digits"),
        ("\udcff{", "it is no JSON"),
        ("{} {}", "it is no JSON"),
    ],
    ids=["lists", "objects", "digits", "bytes", "two"],
)
def test_json_that_breaks_readers(folder, name, text, words):
    (folder / name).write_text(text, errors="surrogateescape")
    refused(folder, rf"{re.escape(name)} is (not a|no) .*{words}")


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_of_nothing(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, r"index\.json names no files of weights")


def layer(**changed):
    """A change of the first layer's kernel."""

    def edit(found):
        first, *rest = found["layers"]
        return {**found, "layers": [{**first, "kernel": {**first["kernel"], **changed}}, *rest]}

    return edit


def of(name, **options):
    """A kernel of another map."""
    return layer(feature_map={"name": name, "options": {"head_dim": 8, **options}})


def nested(depth):
    """A kernel of a map in a map in a map."""
    found = {"name": "Taylor", "options": {"head_dim": 8}}
    for _ in range(depth):
        found = {"name": "Centred", "options": {"inner": found}}
    return layer(feature_map=found)


@pytest.mark.parametrize(
    "edit",
    [
        of("FavorPlus", num_features=10**9),
        of("FavorPlus", num_features=16, num_heads=10**8),
        of("FavorPlus", num_features=16, head_dim=10**6),
        of("FavorPlus", num_features=10**4000),
        of("Hedgehog", head_dim=10**6),
        of("Expansion", num_centres=10**9),
        of("Expansion", num_centres=10**6, order=2),
        of("TensorPolynomial", degree=30),
        of("TensorPolynomial", degree=10**9),
        of("Taylor", head_dim=10**9),
        of("Dpfp", nu=10**9),
        of("Taylor", scale=10**400),
        of("Taylor", scale=float("inf")),
        layer(window=2**40),
        layer(num_merged=2**40),
        layer(window=10**300),
        nested(50),
    ],
)
def test_sizes_beyond_any_model(folder, edit):
    change(folder / "linattn.json", edit)
    assert len(refused(folder, r"linattn\.json, layer 0: ")) < 10_000


def test_a_record_nested_beyond_what_a_reader_takes(folder):
    change(folder / "linattn.json", nested(150))
    refused(folder, r"linattn\.json: Invalid JSON: recursion limit exceeded .*; save the model again")


def test_models_that_are_large_are_read():
    """The limit stands above the largest maps in use."""
    check_size("FavorPlus", {"head_dim": 128, "num_features": 8192, "num_heads": 64, "seed": 2**62})
    check_size("Expansion", {"head_dim": 128, "num_centres": 64, "order": 1})
    check_size("Expansion", {"head_dim": 256, "num_centres": 4096, "order": 0})
    check_size("Taylor", {"head_dim": 256, "order": 2})


@pytest.mark.parametrize("name", ["linattn.safetensors", "model.safetensors"])
@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_tensors(folder, name, kept):
    path = folder / name
    path.write_bytes(path.read_bytes()[:kept])
    refused(
        folder, r"safetensors cannot be read" if name.startswith("linattn") else "transformers cannot load BertModel"
    )


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        {"x": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [10, 4]}},
        {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}},
        {"x": {"dtype": "?", "shape": [2], "data_offsets": [0, 1]}},
        3,
    ],
)
def test_tensors_that_are_none(folder, header):
    text = json.dumps(header).encode()
    (folder / "linattn.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    refused(folder, r"linattn\.safetensors (cannot be read|does not hold)")


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": "wide"},
        {"hidden_size": 10**6},
        {"vocab_size": 10**10},
        {"max_position_embeddings": 10**11},
        {"num_attention_heads": 0},
        {"hidden_size": None},
        {"dtype": "nothing"},
    ],
)
def test_configurations_that_are_not_of_these_weights(folder, changed):
    change(folder / "config.json", lambda found: {**found, **changed})
    refused(folder, r"whole: transformers cannot load BertModel from config\.json|not those of BertModel")


@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings", "intermediate_size"])
def test_configurations_of_far_larger_models(folder, name):
    """Before memory is taken for them."""
    change(folder / "config.json", lambda found: {**found, name: 10**8})
    refused(folder, r"config\.json describes a model of \d+ numbers, and the weights are \d+ bytes")
