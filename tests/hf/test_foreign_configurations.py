"""A linearized model's configuration in a model without its linear attention: refused, where it would be softmax."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import AutoModel

import linattn
from linattn.hf import BoundedCache, from_pretrained, intercept, linearize_, restore_, save_pretrained
from model_inputs import batch

LEARNED = "LearnedExponential(num_features=8)"
WORDS = r"linattn\.hf\.from_pretrained.*attn_implementation=\"sdpa\""


def run(model, inputs):
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        return model(**inputs)[0]


def by_itself(model, folder):
    model.save_pretrained(folder)


@pytest.fixture(params=["bert", "llama", "whisper", "modernbert"])
def model(request, build):
    """Linearized, of a family whose inputs are known."""
    found = build(request.param)
    found.softmax = run(found, batch(request.param))
    linearize_(found, method=LEARNED)
    found.inputs = batch(request.param)
    return found


@pytest.mark.parametrize("save", [by_itself, save_pretrained])
def test_a_folder_that_is_read_by_our_implementation(model, tmp_path, save):
    """The keyword takes the place of what config.json names."""
    save(model, tmp_path / "new")
    other = AutoModel.from_pretrained(tmp_path / "new", attn_implementation="linattn").eval()
    with pytest.raises(ValueError, match=WORDS):
        run(other, model.inputs)
    softmax = AutoModel.from_pretrained(tmp_path / "new", attn_implementation="sdpa").eval()
    assert torch.equal(run(softmax, model.inputs), model.softmax)
    linearize_(softmax, method=LEARNED)
    restore_(softmax)
    assert torch.equal(run(softmax, model.inputs), model.softmax)
    assert torch.equal(run(from_pretrained(tmp_path / "new"), model.inputs), run(model, model.inputs))


@pytest.mark.parametrize("taken", [lambda x: x, copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_model_that_is_built_from_the_configuration(model, taken):
    """It, or a copy: a model that was there before, and has it in common, is another case."""
    other = type(model)(taken(model.config)).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    with pytest.raises(ValueError, match=WORDS):
        run(other, model.inputs)
    with pytest.raises(ValueError, match=WORDS):
        linearize_(other, method=LEARNED)
    with intercept(other, lambda call: call.softmax()):
        run(other, model.inputs)
    restore_(model)
    other.set_attn_implementation("sdpa")
    assert torch.equal(run(other, model.inputs), model.softmax)
    linearize_(other, method=LEARNED)


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_two_models_of_one_configuration(build, copied):
    """As a teacher and a student: what was built before keeps its attention, and a cache may bound it."""
    student, inputs = build("llama", attn_implementation="eager"), batch("llama")
    teacher = type(student)(student.config).eval()
    wanted = run(teacher, inputs)
    linearize_(student, method=LEARNED)
    student, teacher = copied([student, teacher])
    assert torch.equal(run(teacher, inputs), wanted)
    restore_(student)
    assert torch.equal(run(teacher, inputs), wanted)
    teacher.set_attn_implementation("sdpa")
    other = run(teacher, inputs)
    BoundedCache(teacher)
    assert torch.equal(run(teacher, inputs), other)
    assert not any("linattn" in name for module in teacher.modules() for name in vars(module))


def test_copies_of_a_model_attend_as_it_does(model):
    wanted = run(model, model.inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy({"of": [model]})["of"][0]):
        assert torch.equal(run(twin, model.inputs), wanted)
        restore_(twin)
        assert "linearized_by_linattn" not in twin.config.to_dict()
        assert torch.equal(run(twin, model.inputs), model.softmax)


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_part_leaves_the_rest_its_softmax(build, copied, implementation):
    """The encoder and the decoder have one configuration in common."""
    model, inputs = build("bart", attn_implementation=implementation), batch("bart")
    wanted = run(model.decoder, {"input_ids": inputs["decoder_input_ids"]})
    linearize_(model.encoder, method=LEARNED)
    model = copied(model)
    run(model, inputs)
    assert torch.equal(run(model.decoder, {"input_ids": inputs["decoder_input_ids"]}), wanted)


def test_a_bounded_cache_of_such_models(language_model, tmp_path):
    """Softmax is bounded where it was asked for, and a mark goes with it."""
    model, few = language_model("llama"), linattn.MergedKV(4, 8, num_sinks=0)
    inputs = batch("llama")
    wanted = run(model, inputs)
    linearize_(model, method=LEARNED)
    model.save_pretrained(tmp_path / "new")
    other = type(model).from_pretrained(tmp_path / "new", attn_implementation="linattn")
    with pytest.raises(ValueError, match=WORDS):
        BoundedCache(other, config=few)
    softmax = type(model).from_pretrained(tmp_path / "new", attn_implementation="sdpa")
    softmax.generate(inputs["input_ids"], past_key_values=BoundedCache(softmax, config=few), max_new_tokens=4)
    for implementation in ("sdpa", "linattn"):
        softmax.set_attn_implementation(implementation)
        assert torch.equal(run(softmax, inputs), wanted)
    softmax.save_pretrained(tmp_path / "softmax")
    again = type(model).from_pretrained(tmp_path / "softmax", attn_implementation="linattn")
    assert torch.equal(run(again, inputs), wanted)
    twin = type(model)(copy.deepcopy(softmax.config)).eval()
    twin.load_state_dict(softmax.state_dict())
    assert torch.equal(run(twin, inputs), wanted)
