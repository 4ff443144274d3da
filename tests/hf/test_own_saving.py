"""What a linearized model writes by itself is read with its kernels, and by transformers alone not as softmax."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BertModel

from linattn.feature_maps import LearnedExponential
from linattn.hf import from_pretrained, linearize_, load, restore_, save_pretrained
from model_inputs import batch
from programs import TRANSFORMERS

LEARNED = "LearnedExponential(num_features=8)"
# What transformers says of a folder that it cannot read, whichever class is asked to.
REFUSED = r"linattn\.hf\.from_pretrained reads this folder"


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.fixture(params=["bert", "llama", "whisper", "modernbert"])
def model(request, build):
    """Linearized, with weights of its own in each kernel."""
    found = build(request.param)
    linearize_(found, method=LEARNED)
    found.family = request.param
    return found


def by_itself(model, folder):
    model.save_pretrained(folder)


def by_a_trainer(model, folder):
    """As transformers' Trainer saves: into a folder of other files, with the weights it gathered."""
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    model.save_pretrained(folder, state_dict=model.state_dict(), is_main_process=True)


def in_shards(model, folder):
    model.save_pretrained(folder, True, max_shard_size="20KB")


@pytest.mark.parametrize("save", [by_itself, by_a_trainer, in_shards])
def test_its_own_folder_returns_it(model, tmp_path, save):
    save(model, tmp_path / "new")
    twin, inputs = from_pretrained(tmp_path / "new"), batch(model.family)
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    assert torch.equal(run(twin, inputs), run(model, inputs))
    weights = dict(twin.named_parameters())
    assert all(torch.equal(weights[name], x) for name, x in model.named_parameters())


@pytest.mark.parametrize("save", [by_itself, by_a_trainer, in_shards, save_pretrained])
def test_transformers_alone_refuses_the_folder(model, tmp_path, save):
    save(model, tmp_path / "new")
    for kind in (AutoModel, type(model)):
        with pytest.raises(ValueError, match=REFUSED):
            kind.from_pretrained(tmp_path / "new")
    assert AutoConfig.from_pretrained(tmp_path / "new").model_type == model.config.model_type


# Beside other programs that are forked after transformers has been imported.
@pytest.mark.xdist_group("transformers")
def test_without_linattn_too(run_program, build, tmp_path):
    model = build("bert")
    linearize_(model, method=LEARNED)
    save_pretrained(model, tmp_path / "new")
    program = "import sys; from transformers import AutoModel\ntry: AutoModel.from_pretrained(sys.argv[1])\n"
    program += "except ValueError as error: print(error)\nassert 'linattn' not in sys.modules"
    done = run_program(program, tmp_path / "new", after=TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    assert "linattn.hf.from_pretrained reads this folder" in done.stdout


def test_a_part_of_a_linearized_model_is_no_softmax_model(build, tmp_path):
    model = build("llama", head="ForCausalLM")
    linearize_(model, method=LEARNED)
    model.model.save_pretrained(tmp_path / "part")
    model.config.save_pretrained(tmp_path / "config")
    with pytest.raises(ValueError, match=REFUSED):
        AutoModel.from_pretrained(tmp_path / "part")
    with pytest.raises(ValueError, match=REFUSED):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "config"))


def test_training_resumes_from_its_weights(build, tmp_path):
    """A trainer reads the checkpoint's weights into a model that was linearized alike."""
    model, other = build("bert"), build("bert")
    for each, seed in ((model, 1), (other, 2)):
        linearize_(each, method=LEARNED, seed=seed)
    by_a_trainer(model, tmp_path / "checkpoint")
    other.load_state_dict(load_file(tmp_path / "checkpoint" / "model.safetensors"))
    assert torch.equal(run(other, batch("bert")), run(model, batch("bert")))


def test_the_weights_that_were_given_are_written(build, tmp_path):
    model = build("bert")
    linearize_(model, method=LEARNED)
    given = {name: x + 1 if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "new", state_dict=given)
    twin = from_pretrained(tmp_path / "new").state_dict()
    assert all(torch.equal(twin[name], x) for name, x in given.items())


def test_a_map_shared_by_layers(build, tmp_path):
    model, shared = build("bert"), LearnedExponential(8, 8)
    linearize_(model, method=lambda _: shared)
    model.save_pretrained(tmp_path / "new")
    assert torch.equal(run(from_pretrained(tmp_path / "new"), batch("bert")), run(model, batch("bert")))


def test_copies_save_themselves(build, tmp_path):
    model = build("bert")
    linearize_(model, method=LEARNED)
    twin = copy.deepcopy(model)
    restore_(model)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    twin.save_pretrained(tmp_path / "twin")
    assert torch.equal(run(from_pretrained(tmp_path / "twin"), batch("bert")), run(twin, batch("bert")))


def test_a_restored_model_saves_as_before(build, tmp_path):
    model = build("bert")
    model.save_pretrained(tmp_path / "before")
    linearize_(model, method=LEARNED)
    restore_(model)
    model.save_pretrained(tmp_path / "after")
    assert "save_pretrained" not in vars(model)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "after").iterdir()) == ["config.json", "model.safetensors"]


def test_a_loaded_model_restored_is_a_softmax_model_everywhere(build, tmp_path):
    model = build("bert")
    softmax = run(model, batch("bert"))
    linearize_(model, method=LEARNED)
    save_pretrained(model, tmp_path / "new")
    twin = from_pretrained(tmp_path / "new")
    restore_(twin)
    twin.save_pretrained(tmp_path / "plain")
    assert torch.equal(run(AutoModel.from_pretrained(tmp_path / "plain"), batch("bert")), softmax)


def test_folders_of_earlier_versions_are_read(build, tmp_path):
    """Their config.json names no attention, and linattn.safetensors no weights that it belongs to."""
    model = build("bert")
    linearize_(model, method=LEARNED)
    save_pretrained(model, tmp_path / "new")
    path = tmp_path / "new" / "config.json"
    found = json.loads(path.read_text())
    assert found.pop("attn_implementation") == "linattn.hf.from_pretrained reads this folder"
    path.write_text(json.dumps(found))
    tensors = tmp_path / "new" / "linattn.safetensors"
    save_file(load_file(tensors), tensors)
    assert torch.equal(run(from_pretrained(tmp_path / "new"), batch("bert")), run(model, batch("bert")))


def restored(model, folder):
    """The very weights, under softmax again."""
    restore_(model)
    model.save_pretrained(folder)


def trained_further(model, folder):
    """As softmax, from the folder itself."""
    softmax = type(model).from_pretrained(folder, attn_implementation="sdpa")
    with torch.no_grad():
        next(softmax.parameters()).add_(1)
    softmax.save_pretrained(folder)


def weights_alone(model, folder):
    """As accelerate and trainers write the weights of what is no transformers model."""
    weights = load_file(folder / "model.safetensors")
    save_file({name: x + 1 for name, x in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("save", [by_itself, save_pretrained])
@pytest.mark.parametrize("over", [restored, trained_further, weights_alone])
def test_a_folder_that_another_model_was_saved_to_is_no_linearized_one(build, tmp_path, save, over):
    """Without linattn.json it is what was saved last."""
    model, folder = build("bert"), tmp_path / "new"
    linearize_(model, method=LEARNED)
    save(model, folder)
    over(model, folder)
    with pytest.raises(ValueError, match=r"linattn\.json was written beside other files, and .* since.*remove"):
        from_pretrained(folder)
    with pytest.raises(ValueError, match=r"remove linattn\.json"):
        load(folder)
    (folder / "linattn.json").unlink()
    AutoModel.from_pretrained(folder, attn_implementation="sdpa")


def test_a_linearized_model_is_saved_over_another_model(build, tmp_path):
    model, folder = build("bert"), tmp_path / "new"
    linearize_(model, method=LEARNED)
    model.save_pretrained(folder)
    restored(model, folder)
    linearize_(model, method=LEARNED)
    model.save_pretrained(folder)
    assert torch.equal(run(from_pretrained(folder), batch("bert")), run(model, batch("bert")))


@pytest.mark.parametrize("ways", [(by_itself, in_shards), (in_shards, by_itself)])
def test_weights_in_more_or_fewer_files_than_before_are_those_read(build, tmp_path, ways):
    """Transformers leaves one file beside shards, and an index beside one file."""
    model, folder = build("bert"), tmp_path / "new"
    linearize_(model, method=LEARNED)
    for save in ways:
        save(model, folder)
        assert torch.equal(run(from_pretrained(folder), batch("bert")), run(model, batch("bert")))
        with torch.no_grad():
            next(model.parameters()).add_(1)


class Own(BertModel):
    """A class that transformers does not export."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"push_to_hub": True}, r"push_to_hub \(save without it, then upload the folder"),
        ({"variant": "fp16"}, r"variant \(save without it"),
        ({"distributed_checkpoint": True}, r"distributed_checkpoint \(save without it"),
    ],
)
def test_options_for_another_kind_of_folder_are_refused(build, tmp_path, options, words):
    model = build("bert")
    linearize_(model, method=LEARNED)
    with pytest.raises(ValueError, match=words):
        model.save_pretrained(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_weights_of_another_model_are_refused_before_a_file_is_written(build, tmp_path, family):
    """Fewer, more, or under other names; one name of a weight that has two is enough, and only one rank writes."""
    model = build(family, head={"bert": "ForMaskedLM", "llama": "ForCausalLM", "gpt2": "LMHeadModel"}[family])
    linearize_(model, method=LEARNED)
    state = model.state_dict()
    others = [
        dict(list(state.items())[::2]),
        {name: x for name, x in state.items() if "linear_attention" not in name},
        state | {"more": torch.ones(1)},
        {f"module.{name}": x for name, x in state.items()},
    ]
    for other in others:
        with pytest.raises(ValueError, match=rf"weights of {type(model).__name__} are not .*give state_dict=model"):
            model.save_pretrained(tmp_path / "new", state_dict=other)
        assert not (tmp_path / "new").exists()
    tied = {name for name in state if name in model.all_tied_weights_keys}
    assert tied if family == "gpt2" else True
    model.save_pretrained(tmp_path / "new", state_dict={name: x for name, x in state.items() if name not in tied})
    twin, inputs = from_pretrained(tmp_path / "new"), batch(family)
    assert torch.equal(run(twin, inputs), run(model, inputs))
    model.save_pretrained(tmp_path / "new", state_dict=others[0], is_main_process=False)
    assert torch.equal(run(from_pretrained(tmp_path / "new"), inputs), run(model, inputs))


def test_what_cannot_be_read_again_is_not_written(build, tmp_path):
    own = Own(build("bert").config)
    linearize_(own, method=LEARNED)
    with pytest.raises(ValueError, match="Own is no class that transformers exports"):
        own.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
