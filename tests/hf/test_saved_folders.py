"""Folders written by an earlier version load: the same tensors to the bit, the same outputs, the same written form.

`folders/<name>` is what `save_pretrained` wrote at commit 516a8b8, of tiny random models, and
`folders/<name>.safetensors` what the model computed then, in float64: float32 outputs would differ in the last bits
from one processor to another.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import Tensor

from linattn.hf import StateCache, from_pretrained, save_pretrained

FOLDERS = Path(__file__).parent / "folders"
MODELS = ("one_map", "window", "grouped_queries")
# Two float64 evaluations of the same sums on different processors: 2**-53 a rounding, some thousand roundings.
CLOSE = 1e-11
VERSIONS = ("linattn", "torch", "transformers")

# The version that wrote them is not this one from the next release on.
pytestmark = pytest.mark.filterwarnings("ignore:.* was saved by linattn:UserWarning")


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def run(model, **inputs) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("name", [*MODELS, "sentences"])
def test_every_saved_tensor_is_there_under_its_name(name):
    model = from_pretrained(FOLDERS / name)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    for file in ("model.safetensors", "linattn.safetensors"):
        for key, x in load_file(FOLDERS / name / file).items():
            assert torch.equal(state[key], x), key
    kernels = set(load_file(FOLDERS / name / "linattn.safetensors"))
    assert kernels >= {key for key in model.state_dict() if "linear_attention" in key}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_version_that_wrote_the_folder(name):
    model, recorded = from_pretrained(FOLDERS / name).double(), load_file(FOLDERS / f"{name}.safetensors")
    ids, mask = recorded["input_ids"], recorded["attention_mask"]
    assert relative(run(model, input_ids=ids, attention_mask=mask), recorded["output"]) <= CLOSE
    if "streamed" in recorded:
        cache, bounds = StateCache(model), ((0, 9), (9, 10), (10, ids.shape[1]))
        outs = [
            run(model, input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            for start, stop in bounds
        ]
        assert relative(torch.cat(outs, 1), recorded["streamed"]) <= CLOSE


def test_embeddings_are_those_of_the_version_that_wrote_the_folder():
    encoder = SentenceTransformer(
        str(FOLDERS / "sentences"), trust_remote_code=True, device="cpu", local_files_only=True
    ).double()
    ours = torch.from_numpy(encoder.encode(["a b c d", "e f g h i j a b"]))
    assert relative(ours, load_file(FOLDERS / "sentences.safetensors")["output"]) <= CLOSE


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_today_is_what_was_written_then(name, tmp_path):
    save_pretrained(from_pretrained(FOLDERS / name), tmp_path / "again")
    then, now = (
        json.loads((folder / name_of).read_text())
        for folder, name_of in ((FOLDERS / name, "linattn.json"), (tmp_path / "again", "linattn.json"))
    )
    for version in VERSIONS:
        del then[version], now[version]
    # It wrote how many heavy keys there were, which was none.
    assert [layer["kernel"].pop("num_heavy", 0) for layer in then["layers"]] == [0] * len(then["layers"])
    assert now == then


@pytest.mark.parametrize("edit", [{"num_heavy": 2}, {"num_heavy": 2, "rule": "oldest"}, {"num_heavy": -1}], ids=str)
def test_a_folder_with_heavy_keys_is_refused(edit, tmp_path):
    folder = shutil.copytree(FOLDERS / "window", tmp_path / "heavy")
    record = json.loads((folder / "linattn.json").read_text())
    record["layers"][0]["kernel"] |= edit
    (folder / "linattn.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"layer 0: .*heavy keys were removed: use 'window W \+ merged C'"):
        from_pretrained(folder)


def test_a_folder_with_a_method_for_each_head_is_refused_before_its_weights_are_read():
    """Of this folder there is the record alone."""
    names = r"model\.layers\.0\.self_attn, model\.layers\.1\.self_attn"
    with pytest.raises(
        ValueError, match=rf"has a method for each head of {names}, .*; linearize_ the softmax model by"
    ):
        from_pretrained(FOLDERS / "planned")
