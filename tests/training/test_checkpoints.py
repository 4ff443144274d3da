"""What a conversion keeps: whole checkpoints, and only its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from linattn.training.checkpoints import Progress, WorkFolder


@pytest.fixture
def trained():
    """An accelerator with a model whose head is its embedding, and an optimiser that has taken two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    accelerator = Accelerator(device_placement=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
    return accelerator, model, optimizer


def state(model, optimizer):
    held = optimizer.state_dict()["state"][0]
    return [x.clone() for x in (model[0].weight.detach(), held["exp_avg"], held["exp_avg_sq"], held["step"])]


def test_a_checkpoint_brings_back_weights_and_optimiser(trained, tmp_path, caplog):
    accelerator, model, optimizer = trained
    folder, progress = WorkFolder(tmp_path, {}, kind="conversion"), Progress(2, 7.5, 3.0, 0.5, 0.25)
    best = {name: x + 1 for name, x in model.state_dict().items()}
    before = state(model, optimizer)
    folder.save("transfer", accelerator, progress, best)
    optimizer.zero_grad()
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    found, tensors = WorkFolder(tmp_path, {}, kind="conversion").resume("transfer", accelerator)
    assert found == progress
    assert tensors.keys() == best.keys()
    assert all(torch.equal(tensors[name], best[name]) for name in best)
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizer), before, strict=True))
    assert model[1].weight is model[0].weight
    assert not caplog.records
    assert WorkFolder(tmp_path, {}, kind="conversion").resume("distillation", accelerator) is None


def kept(place):
    return sorted(path.name for path in place.iterdir())


def test_only_the_last_whole_checkpoint_counts(trained, tmp_path):
    accelerator, model, _ = trained
    folder, best = WorkFolder(tmp_path, {}, kind="conversion"), dict(model.state_dict())
    del best["1.weight"]
    place = tmp_path / "checkpoints" / "transfer"
    folder.save("transfer", accelerator, Progress(99, 1.0, 1.0, 1.0, 1.0), best)
    # What a kill leaves of the next one.
    draft = place / ".step-00000200.abc.part"
    draft.mkdir()
    (draft / "progress.json").write_text("{")
    assert folder.resume("transfer", accelerator)[0].step == 99
    folder.save("transfer", accelerator, Progress(100, 2.0, 1.0, 1.0, 1.0), best)
    assert kept(place) == ["step-00000099", "step-00000100"]
    folder.save("transfer", accelerator, Progress(1000, 3.0, 1.0, 1.0, 1.0), best)
    assert kept(place) == ["step-00000100", "step-00001000"]


def test_a_checkpoint_that_fails_leaves_the_one_before(trained, tmp_path, monkeypatch):
    accelerator, model, _ = trained
    folder, best = WorkFolder(tmp_path, {}, kind="conversion"), {"0.weight": model[0].weight.detach()}
    folder.save("transfer", accelerator, Progress(1, 1.0, 1.0, 1.0, 1.0), best)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("linattn.training.checkpoints.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        folder.save("transfer", accelerator, Progress(2, 2.0, 1.0, 1.0, 1.0), best)
    assert [path.name for path in (tmp_path / "checkpoints" / "transfer").iterdir()] == ["step-00000001"]
    assert folder.resume("transfer", accelerator)[0].step == 1


def test_a_full_disk_names_the_checkpoint(trained, tmp_path, monkeypatch):
    """Torch's own error says neither which file nor why."""
    accelerator, model, _ = trained
    folder, best = WorkFolder(tmp_path, {}, kind="conversion"), {"0.weight": model[0].weight.detach()}
    place = tmp_path / "checkpoints" / "transfer"
    for error, words in (
        (RuntimeError("unexpected pos 832 vs 726"), r" was not written \(unexpected pos 832 vs 726\); free some space"),
        (ValueError("I/O error: No space left on device"), " was not written; free some space"),
    ):

        def full(*_, error=error, **__):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(Accelerator, "save_state", full)
            with pytest.raises(OSError, match=f"{place / 'step-00000002'}{words}"):
                folder.save("transfer", accelerator, Progress(2, 2.0, 1.0, 1.0, 1.0), best)
        assert kept(place) == []


def flip(file):
    """One bit of a byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


FILES = ["best.safetensors", "optimizer.bin", "progress.json", "pytorch_model.bin", "random_states_0.pkl"]


@pytest.fixture
def twice(trained, tmp_path):
    """A work folder with two checkpoints, and the accelerator."""
    accelerator, model, _ = trained
    folder, best = WorkFolder(tmp_path, {}, kind="conversion"), {"0.weight": model[0].weight.detach()}
    for step in (1, 2):
        folder.save("transfer", accelerator, Progress(step, 1.0, 1.0, 1.0, 1.0), best)
    return folder, accelerator, tmp_path / "checkpoints" / "transfer"


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, "digests.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(twice, caplog, name, harm):
    folder, accelerator, place = twice
    assert {*FILES, "digests.json"} == {path.name for path in (place / "step-00000002").iterdir()}
    harm(place / "step-00000002" / name)
    assert folder.resume("transfer", accelerator)[0].step == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{place / 'step-00000002'}" in record.getMessage()
    assert "is damaged: " in record.getMessage()
    assert f"the transfer goes on from the checkpoint before, {place / 'step-00000001'}" in record.getMessage()
    # The step that is to come again finds its place free.
    assert kept(place) == ["step-00000001"]


def test_damaged_checkpoints_alone_are_an_error_that_names_the_cure(twice):
    folder, accelerator, place = twice
    for step in (1, 2):
        flip(place / f"step-0000000{step}" / "optimizer.bin")
    with pytest.raises(ValueError, match="no checkpoint of the transfer is whole") as caught:
        folder.resume("transfer", accelerator)
    for step in (1, 2):
        assert f"{place / f'step-0000000{step}' / 'optimizer.bin'} is damaged: its bytes are not" in str(caught.value)
    assert f"remove {place} to do the transfer anew, or {folder.path} to begin all anew" in str(caught.value)
    # Nothing was thrown away.
    assert kept(place) == ["step-00000001", "step-00000002"]


def test_damaged_settings_and_stages_are_named_with_their_cure(tmp_path):
    folder = WorkFolder(tmp_path, {"seed": 0}, kind="conversion")
    folder.claim()
    folder.remember("uniform", Progress(1, 2.0, 1.0, 1.0, float("inf")))
    assert folder.recall("uniform", Progress) == Progress(1, 2.0, 1.0, 1.0, float("inf"))
    for name in ("uniform.json", "conversion.json"):
        (tmp_path / name).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"uniform.json is not a stage: it is no JSON \(.*\); remove it, and"):
        folder.recall("uniform", Progress)
    with pytest.raises(
        ValueError, match=rf"conversion.json is .*: it is no JSON \(.*\); remove {tmp_path} to begin anew"
    ):
        WorkFolder(tmp_path, {"seed": 0}, kind="conversion")


def test_another_conversion_is_refused_by_what_differs(tmp_path):
    settings = {"seed": 0, "layers": (0, 1), "feature_map": "Taylor", "samples": "ab"}
    WorkFolder(tmp_path, settings, kind="conversion").claim()
    WorkFolder(tmp_path, dict(reversed(settings.items())), kind="conversion")
    with pytest.raises(ValueError, match=r"other settings \(layers: \[0, 1\], now \[0\], seed: 0, now 1\); go on"):
        WorkFolder(tmp_path, {**settings, "seed": 1, "layers": (0,)}, kind="conversion")
    with pytest.raises(ValueError, match=r"\(batch_size: None, now 2\)"):
        WorkFolder(tmp_path, {**settings, "batch_size": 2}, kind="conversion")


def test_nothing_is_made_before_there_is_something_to_keep(tmp_path):
    place = tmp_path / "work"
    folder = WorkFolder(place, {"seed": 0}, kind="conversion")
    assert folder.recall("uniform", Progress) is None
    assert not place.exists()
    folder.remember("uniform", Progress(1, 2.0, 1.0, 1.0, 1.0))
    assert WorkFolder(place, {"seed": 0}, kind="conversion").recall("uniform", Progress) == Progress(
        1, 2.0, 1.0, 1.0, 1.0
    )
    assert json.loads((place / "uniform.json").read_text())["seconds"] == 2.0
