"""What a conversion keeps: whole checkpoints, and only its own."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from checkpointing import resume, save
from linattn.training import tensors
from linattn.training.checkpoints import Progress, WorkFolder


def state(model, optimizer):
    held = optimizer.state_dict()["state"][0]
    return [x.clone() for x in (model[0].weight.detach(), held["exp_avg"], held["exp_avg_sq"], held["step"])]


def test_a_checkpoint_brings_back_weights_and_optimiser(trained, tmp_path, logged):
    model, optimizer = trained
    folder, progress = WorkFolder(tmp_path, {}, kind="conversion"), Progress(2, 7.5, 3.0, 0.5, 0.25)
    best = {name: x + 1 for name, x in model.state_dict().items()}
    before, random = state(model, optimizer), torch.get_rng_state()
    save(folder, trained, progress, best)
    optimizer.zero_grad()
    torch.rand(3)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    found, tensors = resume(WorkFolder(tmp_path, {}, kind="conversion"), trained)
    assert found == progress
    assert tensors.keys() == best.keys()
    assert all(torch.equal(tensors[name], best[name]) for name in best)
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizer), before, strict=True))
    assert model[1].weight is model[0].weight
    assert torch.equal(torch.get_rng_state(), random)
    assert not [record for record in logged if record.levelname != "DEBUG"]
    assert WorkFolder(tmp_path, {}, kind="conversion").last("distillation") is None


def kept(place):
    return sorted(path.name for path in place.iterdir())


def test_only_the_last_whole_checkpoint_counts(trained, tmp_path):
    model, _ = trained
    folder, best = WorkFolder(tmp_path, {}, kind="conversion"), dict(model.state_dict())
    place = tmp_path / "checkpoints" / "transfer"
    save(folder, trained, Progress(99, 1.0, 1.0, 1.0, 1.0), best)
    # What a kill leaves of the next one.
    draft = place / ".step-00000200.abc.part"
    draft.mkdir()
    (draft / "progress.json").write_text("{")
    assert folder.last("transfer")[1].step == 99
    save(folder, trained, Progress(100, 2.0, 1.0, 1.0, 1.0), best)
    assert kept(place) == ["step-00000099", "step-00000100"]
    save(folder, trained, Progress(1000, 3.0, 1.0, 1.0, 1.0), best)
    assert kept(place) == ["step-00000100", "step-00001000"]


def test_a_checkpoint_that_fails_leaves_the_one_before(trained, tmp_path, monkeypatch):
    model, _ = trained
    folder, best = WorkFolder(tmp_path, {}, kind="conversion"), dict(model.state_dict())
    save(folder, trained, Progress(1, 1.0, 1.0, 1.0, 1.0), best)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save(folder, trained, Progress(2, 2.0, 1.0, 1.0, 1.0), best)
    assert [path.name for path in (tmp_path / "checkpoints" / "transfer").iterdir()] == ["step-00000001"]
    assert folder.last("transfer")[1].step == 1


def test_a_full_disk_names_the_checkpoint(trained, tmp_path, monkeypatch):
    """safetensors' own error is no OSError, and does not say which checkpoint."""
    model, _ = trained
    folder, best = WorkFolder(tmp_path, {}, kind="conversion"), dict(model.state_dict())
    place = tmp_path / "checkpoints" / "transfer"
    for error, words in (
        (SafetensorError("I/O error: broken"), r" was not written \(I/O error: broken\); free some space"),
        (SafetensorError("I/O error: No space left on device"), " was not written; free some space"),
    ):

        def full(*_, error=error, **__):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(tensors, "save_file", full)
            with pytest.raises(OSError, match=f"{place / 'step-00000002'}{words}"):
                save(folder, trained, Progress(2, 2.0, 1.0, 1.0, 1.0), best)
        assert kept(place) == []


def test_a_file_that_may_not_grow_is_a_full_disk(trained, tmp_path):
    model, _ = trained
    folder, limits = WorkFolder(tmp_path, {}, kind="conversion"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="step-00000002 was not written; free some space") as caught:
            save(folder, trained, Progress(2, 2.0, 1.0, 1.0, 1.0), dict(model.state_dict()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError)
    assert kept(tmp_path / "checkpoints" / "transfer") == []


def flip(file):
    """One bit of a byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


FILES = ["tensors.safetensors", "progress.json"]


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, "digests.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(twice, logged, name, harm):
    folder, place = twice
    assert {*FILES, "digests.json"} == {path.name for path in (place / "step-00000002").iterdir()}
    harm(place / "step-00000002" / name)
    assert folder.last("transfer")[1].step == 1
    (record,) = logged
    assert record.levelname == "WARNING"
    assert f"{place / 'step-00000002'}" in record.getMessage()
    assert "is damaged: " in record.getMessage()
    assert f"the transfer goes on from the checkpoint before, {place / 'step-00000001'}" in record.getMessage()
    # The step that is to come again finds its place free.
    assert kept(place) == ["step-00000001"]


def test_a_checkpoint_that_is_not_read_this_time_is_kept(twice, monkeypatch):
    """A disk or network that fails for a moment says nothing of its bytes."""
    folder, place = twice

    def fails(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("linattn.training.checkpoints._digest", fails)
    with pytest.raises(
        OSError, match=r"step-00000002 was not read \(.*\); try again, or remove it to use the one before"
    ):
        folder.last("transfer")
    assert kept(place) == ["step-00000001", "step-00000002"]


def test_damaged_checkpoints_alone_are_an_error_that_names_the_cure(twice):
    folder, place = twice
    for step in (1, 2):
        flip(place / f"step-0000000{step}" / "tensors.safetensors")
    with pytest.raises(ValueError, match="no checkpoint of the transfer is whole") as caught:
        folder.last("transfer")
    for step in (1, 2):
        assert f"{place / f'step-0000000{step}' / 'tensors.safetensors'} is damaged: its bytes are not" in str(
            caught.value
        )
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
