"""A checkpoint that somebody else has written or changed runs nothing, leads nowhere else, and changes nothing.

Digests are no proof against it: whoever changes a file can write its digest.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpointing import ALONE, resume, save, seal, unchanged
from linattn.training.checkpoints import Progress, WorkFolder
from linattn.training.tensors import held, put

FILE = "tensors.safetensors"
WEIGHT, MOMENT, STEP = "model.0.weight", "optimizer.0.weight.exp_avg", "optimizer.0.weight.step"


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("name", [FILE, "progress.json", "digests.json"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_pickle_in_any_place_runs_nothing(twice, trained, tmp_path, name, number):
    folder, place = twice
    checkpoint, trap = place / f"step-0000000{number}", tmp_path / "run"
    (checkpoint / name).write_bytes(pickle.dumps(Trap(trap)))
    if name != "digests.json":
        seal(checkpoint)
    if number == 1:
        # The only one left.
        shutil.rmtree(place / "step-00000002")
    is_kept = name == "digests.json" and number == 2
    with unchanged(*trained):
        if is_kept:
            assert folder.last("transfer")[1].step == 1
        else:
            with pytest.raises(ValueError, match=r"tensors\.safetensors|progress\.json|digests\.json"):
                resume(folder, trained)
    assert not trap.exists()


def beside(checkpoint, name):
    """Another file of the checkpoint's, out of it."""
    outside = checkpoint.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    return shutil.move(checkpoint / name, outside / name)


def link(checkpoint, name):
    (checkpoint / name).symlink_to(beside(checkpoint, name))


def link_all(checkpoint, name):
    outside = checkpoint.parent.parent / "outside"
    shutil.move(checkpoint, outside)
    checkpoint.symlink_to(outside)


def listed(checkpoint, change):
    """Change the table of digests alone."""
    path = checkpoint / "digests.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(change(table)))


def lead(checkpoint, *, is_absolute):
    """List a file that is not in the checkpoint in place of one that is."""
    outside = beside(checkpoint, FILE)
    name = str(outside) if is_absolute else f"../../outside/{FILE}"
    listed(checkpoint, lambda table: {name if one == FILE else one: digest for one, digest in table.items()})


HARMS = {
    "nothing listed": lambda checkpoint: listed(checkpoint, lambda table: {}),
    "a list": lambda checkpoint: listed(checkpoint, list),
    "one not listed": lambda checkpoint: listed(checkpoint, lambda table: {FILE: table[FILE]}),
    "one more file": lambda checkpoint: (checkpoint / "more").touch(),
    "a folder": lambda checkpoint: (checkpoint / "more").mkdir(),
    "a pipe": lambda checkpoint: os.mkfifo(checkpoint / "more"),
    "a file above": lambda checkpoint: lead(checkpoint, is_absolute=False),
    "a file elsewhere": lambda checkpoint: lead(checkpoint, is_absolute=True),
    "a link": lambda checkpoint: link(checkpoint, FILE),
    "a linked table": lambda checkpoint: link(checkpoint, "digests.json"),
    "a linked checkpoint": lambda checkpoint: link_all(checkpoint, None),
    "no tensors": lambda checkpoint: [(checkpoint / FILE).unlink(), seal(checkpoint)],
    "no progress": lambda checkpoint: [(checkpoint / "progress.json").unlink(), seal(checkpoint)],
    "no folder": lambda checkpoint: [shutil.rmtree(checkpoint), checkpoint.touch()],
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_checkpoint_is_its_listed_files_and_no_others(twice, logged, harm):
    folder, place = twice
    HARMS[harm](place / "step-00000002")
    outside = {path: path.read_bytes() for path in place.parent.rglob("outside/*") if path.is_file()}
    assert folder.last("transfer")[1].step == 1
    assert any("is damaged: " in record.getMessage() for record in logged)
    assert [path.name for path in place.iterdir()] == ["step-00000001"]
    # What a link leads to is not removed with it.
    assert all(path.read_bytes() == content for path, content in outside.items())


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def other(change):
    """Another file of safetensors in its place."""

    def made(path):
        tensors = load_file(path)
        change(tensors)
        save_file({name: x.clone().contiguous() for name, x in tensors.items()}, path)

    return made


def header(name, **fields):
    """A file whose header says something else of a tensor, in as many bytes."""

    def made(path):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        table = json.loads(content[8 : 8 + size])
        table[name].update(fields)
        said = json.dumps(table).encode()
        path.write_bytes(len(said).to_bytes(8, "little") + said + content[8 + size :])

    return made


FILES = {
    "cut": (cut, "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"more"), "cannot be read"),
    "zeros": (lambda path: path.write_bytes(bytes(1000)), "cannot be read"),
    "a header beyond the file": (lambda path: path.write_bytes(b"\xff" * 1000), "cannot be read"),
    "no name of a dtype": (header(WEIGHT, dtype="os.system"), "cannot be read"),
    "a negative size": (header(WEIGHT, shape=[-5, -3]), "cannot be read"),
    "a huge size": (header(WEIGHT, shape=[2**40, 3]), "cannot be read"),
    "another shape": (header(WEIGHT, shape=[3, 5]), rf"{WEIGHT} is torch.float32 \[3, 5\], wanted .* \[5, 3\]"),
    "another dtype": (header(WEIGHT, dtype="I32"), rf"{WEIGHT} is torch.int32 \[5, 3\], wanted torch.float32"),
    "fewer numbers": (other(lambda tensors: tensors.update({WEIGHT: torch.zeros(4, 3)})), r"\[4, 3\], wanted"),
    "a shaped step": (other(lambda tensors: tensors.update({STEP: torch.zeros(1)})), rf"{STEP} is .* \[1\], wanted"),
    "a weight left out": (other(lambda tensors: tensors.pop(WEIGHT)), f"{WEIGHT} is missing"),
    "a moment left out": (other(lambda tensors: tensors.pop(MOMENT)), f"{MOMENT} is missing"),
    "a best weight left out": (other(lambda tensors: tensors.pop("best.0.weight")), "best.0.weight is missing"),
    "no random numbers": (other(lambda tensors: tensors.pop("random")), "random is missing"),
    "a tensor more": (other(lambda tensors: tensors.update(x=torch.zeros(1))), "x is surplus"),
    "a name of no weight": (
        other(lambda tensors: tensors.update({"optimizer.9.exp_avg": torch.zeros(1)})),
        "optimizer.9.exp_avg is surplus",
    ),
    "a moment that is none": (
        other(lambda tensors: tensors.update({"optimizer.0.weight.lr": torch.zeros(1)})),
        "optimizer.0.weight.lr is surplus",
    ),
    "another state of random numbers": (
        other(lambda tensors: tensors.update(random=torch.zeros_like(tensors["random"]))),
        "state of random numbers is none",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_the_models_is_refused_before_anything_changes(twice, trained, name):
    (folder, place), (change, words) = twice, FILES[name]
    checkpoint = place / "step-00000002"
    change(checkpoint / FILE)
    seal(checkpoint)
    with unchanged(*trained), pytest.raises(ValueError, match=words):
        resume(folder, trained)


CHANGES = {
    "a weight of another shape": {WEIGHT: torch.zeros(3, 5)},
    "a best weight of another dtype": {"best.1.weight": torch.zeros(5, 3, dtype=torch.float64)},
    "a moment of another shape": {MOMENT: torch.zeros(1)},
    "a moment of no weight": {"optimizer.2.weight.exp_avg": torch.zeros(5, 3)},
    "no moment of torch's": {"optimizer.0.weight.momentum": torch.zeros(5, 3)},
    "random numbers of another kind": {"random": torch.zeros(16, dtype=torch.uint8)},
    "no state of random numbers": {"random": torch.zeros_like(torch.get_rng_state())},
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_do_not_fit_are_refused_before_any_is_given(trained, name):
    model, optimizer = trained
    tensors = {name: x.clone() + 1 for name, x in held(model, optimizer, dict(model.state_dict())).items()}
    with unchanged(model, optimizer), pytest.raises(ValueError, match="the checkpoint"):
        put({**tensors, "random": torch.get_rng_state(), **CHANGES[name]}, model, optimizer, ALONE)


def test_weights_without_a_gradient_have_no_moments(tmp_path):
    """What an optimiser keeps of a weight is all there, or nothing is."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.sum().backward()
    optimizer.step()
    folder = WorkFolder(tmp_path, {}, kind="conversion")
    save(folder, (model, optimizer), Progress(1, 1.0, 1.0, 1.0, 1.0), dict(model.state_dict()))
    stored = load_file(tmp_path / "checkpoints/transfer/step-00000001" / FILE)
    assert "optimizer.weight.step" in stored
    assert "optimizer.bias.step" not in stored
    with unchanged(model, optimizer):
        resume(folder, (model, optimizer))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_numbers_come_back_to_the_bit(tmp_path, dtype):
    """NaNs with their payloads, infinities and zeros' signs too; numbers of no dimension, and tensors of no number."""
    model = torch.nn.Module()
    bits = torch.randint(-(2**7), 2**7, (24 * dtype.itemsize,), dtype=torch.int8)
    model.weight = torch.nn.Parameter(bits.view(dtype).view(2, 3, 4).transpose(0, 2))
    for name, x in (("flag", torch.tensor(True)), ("none", torch.zeros(0, 3)), ("count", torch.tensor(2**62))):
        model.register_buffer(name, x)
    optimizer, folder = torch.optim.AdamW(model.parameters()), WorkFolder(tmp_path, {}, kind="conversion")
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    save(folder, (model, optimizer), Progress(1, 1.0, 1.0, 1.0, 1.0), expected)
    with torch.no_grad():
        for x in model.state_dict().values():
            x.zero_()
    _, best = resume(folder, (model, optimizer))
    for found in (best, model.state_dict()):
        for name, x in expected.items():
            assert found[name].dtype == x.dtype
            assert torch.equal(*(y.contiguous().flatten().view(torch.uint8) for y in (found[name], x)))


def test_a_dtype_that_files_do_not_have_is_refused(tmp_path):
    model = torch.nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    model.weight = torch.nn.Parameter(torch.zeros(2))
    trained = model, torch.optim.AdamW(model.parameters())
    folder = WorkFolder(tmp_path, {}, kind="conversion")
    with pytest.raises(ValueError, match=r"no checkpoint keeps tensors of torch\.complex128; take another dtype"):
        save(folder, trained, Progress(1, 1.0, 1.0, 1.0, 1.0), {})
    assert list((tmp_path / "checkpoints" / "transfer").iterdir()) == []
