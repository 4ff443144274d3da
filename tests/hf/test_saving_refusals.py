"""What cannot be saved is refused before a folder appears; a folder that is not whole is refused by what is wrong."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertForSequenceClassification, BertModel

from grid import Learned
from linattn.feature_maps import Taylor
from linattn.hf import _model_records, from_pretrained, linearize_, save_pretrained
from model_inputs import batch

PLACE = "encoder.layer.0.attention.self"
TENSOR = f"{PLACE}.linear_attention.feature_map"


@pytest.fixture
def model(build):
    found = build("bert")
    linearize_(found, method="FavorPlus(num_features=16)")
    return found


class Own(BertModel):
    """A class that transformers does not export."""


def test_what_cannot_be_saved(build, model, tmp_path):
    with pytest.raises(ValueError, match="BertModel is not linearized; call linearize_ on it first"):
        save_pretrained(build("bert"), tmp_path / "new")
    with pytest.raises(ValueError, match=r"Own has its configuration in common with a linearized model.*deepcopy"):
        linearize_(Own(model.config), method="EluPlusOne")
    own = Own(build("bert").config)
    linearize_(own, method="EluPlusOne")
    with pytest.raises(ValueError, match=r"Own is no class that transformers exports"):
        save_pretrained(own, tmp_path / "new")
    other = build("bert")
    linearize_(other, method=lambda head_dim: Learned(head_dim, 8, 4), layers=[1])
    with pytest.raises(ValueError, match=r"grid\.Learned is not one of linattn's own maps"):
        save_pretrained(other, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_folders_that_hold_something_stay_as_they_are(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(FileExistsError, match=f"{name} exists and is not an empty folder; give a new folder"):
            save_pretrained(model, tmp_path / name)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["file", "folder", "folder/file"]
    (tmp_path / "empty").mkdir()
    save_pretrained(model, tmp_path / "empty")
    assert torch.equal(*(m(**batch("bert"))[0] for m in (from_pretrained(tmp_path / "empty"), model)))


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_save_leaves_nothing(model, tmp_path, monkeypatch, end):
    seen = []

    def stop(folder, *_):
        seen.append(sorted(path.name for path in folder.iterdir()))
        raise end

    monkeypatch.setattr(_model_records, "save_file", lambda tensors, path, metadata: stop(path.parent))
    with pytest.raises(type(end) if isinstance(end, OSError) else end):
        save_pretrained(model, tmp_path / "new")
    assert seen == [["config.json", "model.safetensors"]]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["linattn.json", "linattn.safetensors", "model.safetensors", "config.json"])
def test_missing_files_are_named(folder, name):
    (folder / name).unlink()
    words = "save the model again"
    with pytest.raises(FileNotFoundError, match=rf"whole/{re.escape(name)} is missing.*{words}"):
        from_pretrained(folder)
    with pytest.raises(FileNotFoundError):
        from_pretrained(folder / "elsewhere")


def test_weights_in_several_files(model, folder):
    softmax = BertModel.from_pretrained(folder, attn_implementation="sdpa")
    softmax.save_pretrained(folder / "parts", max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    for path in (folder / "parts").glob("model*"):
        shutil.move(path, folder)
    assert torch.equal(*(m(**batch("bert"))[0] for m in (from_pretrained(folder), model)))
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 1
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"{parts[1].name} is missing, and with it the softmax model"):
        from_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json names no files of weights"):
        from_pretrained(folder)


def layer(**changed):
    """A change of the first layer's record."""
    return lambda record: {**record, "layers": [{**record["layers"][0], **changed}, *record["layers"][1:]]}


def with_options(layer, **changed):
    """The map of a layer's record, some of its options others."""
    feature_map = layer["kernel"]["feature_map"]
    return {**feature_map, "options": {**feature_map["options"], **changed}}


def kernel(**changed):
    """A change of the first layer's kernel."""
    return lambda record: layer(kernel={**record["layers"][0]["kernel"], **changed})(record)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: [], 'is not a linattn model: it wants "kind": "linattn model"'),
        (lambda record: {**record, "kind": "linattn plan"}, 'it wants "kind": "linattn model"'),
        (lambda record: {**record, "version": 2}, "is a linattn model of version 2, this reads 1"),
        (lambda record: {**record, "more": 2}, "there is no 'more', wanted the fields ['dtype', 'layers', 'linattn',"),
        (lambda record: {**record, "dtype": "float33"}, "there is no dtype 'float33'"),
        (lambda record: {**record, "dtype": "nn"}, "there is no dtype 'nn'"),
        (lambda record: {**record, "model_class": "ErtModel"}, "has no model 'ErtModel'"),
        (lambda record: {**record, "model_class": "BertConfig"}, "has no model 'BertConfig'"),
        (lambda record: {**record, "num_layers": 3}, "written for 3 attention layers, BertModel has 2"),
        (lambda record: {**record, "layers": []}, "layers must be a list of at least one layer"),
        (lambda record: {**record, "layers": [3]}, "layers[0] must be an object, got 3"),
        (lambda record: {**record, "tensors": []}, "tensors must be an object, got list"),
        (layer(number="0"), "layers[0].number must be a valid integer, got '0'"),
        (layer(number=2), f"layer 2 is {PLACE} there and None in BertModel"),
        (layer(number=1), f"layer 1 is {PLACE} there and encoder.layer.1.attention.self in BertModel"),
        (layer(module_name="other"), f"layer 0 is other there and {PLACE} in BertModel"),
        (lambda record: {**record, "layers": record["layers"][:1] * 2}, "each once"),
        (
            layer(kernel=None),
            "layer 0: it must be an object, got None, wanted the fields ['bits', 'feature_map', 'merged', 'num_heavy',",
        ),
        (lambda record: {**record, "version": True}, "is a linattn model of version True, this reads 1"),
        (kernel(feature_map=None), "layer 0: feature_map is null and merged is missing"),
        (kernel(window=4.0), "layer 0: window must be a valid integer, got 4.0"),
        (kernel(window=3), "layer 0: the window must be a power of two below 2³¹, as 16 or 32, got 3"),
        (kernel(feature_map={"name": "Performer", "options": {}}), "layer 0: there is no feature map 'Performer'"),
        (
            kernel(feature_map={"name": "Relu", "options": {"head_dim": 8, "floor": 0.0}}),
            "layer 0: Error(s) in loading state_dict",
        ),
        (
            lambda record: kernel(feature_map=with_options(record["layers"][0], num_features=8))(record),
            "size mismatch for feature_map.projection",
        ),
        (lambda record: {**record, "tensors": {}}, f"wanted none, {TENSOR}.seed is {{"),
        (lambda record: {**record, "layers": record["layers"][1:]}, f"{TENSOR}.projection, {TENSOR}.seed belong to no"),
    ],
)
def test_records_that_are_wrong(folder, change, words):
    path = folder / "linattn.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=re.escape(words)):
        from_pretrained(folder)


def keys(values, *, place=()):
    """The place of every key in a record, those of tensors left out."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in items:
        if isinstance(values, dict):
            yield *place, name
        if name != "tensors":
            yield from keys(value, place=(*place, name))


def test_a_record_without_any_of_its_keys(folder):
    """Options of a map too, for which its constructor has a default: that would be another model."""
    path = folder / "linattn.json"
    record = json.loads(path.read_text())
    places = list(keys(record))
    assert ("layers", 0, "kernel", "feature_map", "options", "scale") in places
    for place in places:
        changed = copy.deepcopy(record)
        inner = changed
        for name in place[:-1]:
            inner = inner[name]
        del inner[place[-1]]
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"linattn\.json") as caught:
            from_pretrained(folder)
        assert place[-1] in str(caught.value), place


def test_files_that_are_broken(folder):
    text = (folder / "linattn.json").read_text()
    (folder / "linattn.json").write_text(text[:-20])
    with pytest.raises(ValueError, match=r"linattn\.json is not a linattn model: it is no JSON"):
        from_pretrained(folder)
    (folder / "linattn.json").write_text(text)
    (folder / "linattn.safetensors").write_bytes((folder / "linattn.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"linattn\.safetensors cannot be read"):
        from_pretrained(folder)


def rewrite(path, change) -> None:
    """Tensors by name, changed in the file."""
    tensors: dict[str, Tensor] = {name: x.clone() for name, x in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop(f"{TENSOR}.seed"), f"{TENSOR}.seed is missing"),
        (lambda x: x.update(other=torch.ones(1)), "other is {'dtype': 'float32', 'shape': [1]}, wanted none"),
        (
            lambda x: x.update({f"{TENSOR}.projection": torch.ones(8, 16, dtype=torch.float64)}),
            f"{TENSOR}.projection is {{'dtype': 'float64', 'shape': [8, 16]}}, wanted {{'dtype': 'float64',",
        ),
        (
            lambda x: x.update({f"{TENSOR}.projection": torch.ones(16, 8)}),
            f"{TENSOR}.projection is {{'dtype': 'float32',",
        ),
    ],
)
def test_tensors_that_are_missing_surplus_or_of_another_shape(folder, change, words):
    rewrite(folder / "linattn.safetensors", change)
    with pytest.raises(ValueError, match=re.escape(words)):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop("pooler.dense.bias"), "not those of BertModel: pooler.dense.bias is missing"),
        (lambda x: x.update(other=torch.ones(1)), "not those of BertModel: other is surplus"),
    ],
)
def test_weights_that_are_missing_or_surplus(folder, change, words):
    """transformers draws the first anew and forgets the second, and says so in its log."""
    rewrite(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match=re.escape(words)):
        from_pretrained(folder)


def test_buffers_of_another_shape(build, tmp_path):
    model = build("llama")
    linearize_(model, method=lambda head_dim: Taylor(head_dim))
    name = "rotary_emb.inv_freq"
    model.rotary_emb.inv_freq = torch.ones(3)
    save_pretrained(model, tmp_path / "new")
    with pytest.raises(ValueError, match=rf"{name} is \(3,\), LlamaModel wants \(4,\)"):
        from_pretrained(tmp_path / "new")


def test_a_model_around_a_linearized_one_is_read_as_its_refusal_says(build, tmp_path):
    outer = BertForSequenceClassification(build("bert").config).eval().double()
    linearize_(outer.bert, method="LearnedExponential(num_features=8)")
    outer.save_pretrained(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"a model around a linearized one was saved, load it with transformers"
    ):
        from_pretrained(tmp_path)
    found = BertForSequenceClassification.from_pretrained(tmp_path, attn_implementation="sdpa", dtype="float64").eval()
    linearize_(found.bert, method="LearnedExponential(num_features=8)")
    found.load_state_dict(load_file(tmp_path / "model.safetensors"))
    inputs = batch("bert")
    assert torch.equal(found(**inputs).logits, outer(**inputs).logits)


def test_weights_that_a_class_would_add_are_named_without_adapters(build, tmp_path):
    model = BertModel(build("bert").config, add_pooling_layer=False)
    linearize_(model, method="EluPlusOne")
    with pytest.raises(ValueError, match=r"pooler.*build it as its class does, or save the model that it is a part of"):
        save_pretrained(model, tmp_path / "new")


def test_links_are_followed_and_the_working_directory_stays(model, tmp_path, monkeypatch):
    for name in ("empty", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name, target in (("link", "empty"), ("dangling", "new")):
        save_pretrained(model, tmp_path / name)
        assert (tmp_path / target / "linattn.json").is_file()
        assert (tmp_path / name).is_symlink()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileExistsError, match="holds the working directory"):
        save_pretrained(model, ".")
    assert not list((tmp_path / "here").iterdir())
