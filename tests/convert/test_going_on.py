"""A conversion in a folder: cut off it goes on as if it had not been, with more time, and alone."""

from __future__ import annotations

import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from converted import agreement, names, state, unchanged
from linattn.convert import ConvertConfig, convert_, course
from linattn.convert.running import run
from linattn.convert.stages import measure
from linattn.hf import is_linearized
from linattn.records.files import LOCK, InUseError, locked

# Of the ticking clock, on which a step takes half a second and what belongs to it as much.
CONFIG = ConvertConfig("LearnedExponential(num_features=8)", minutes=0.2, learning_rate=1e-3)


class CutError(Exception):
    """What a kill is to a test."""


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_conversion_cut_off_in_both_trainings_is_one_that_was_not(
    build, batches, clock, tmp_path, monkeypatch, family
):
    for name in ("transfer", "distil"):
        own = getattr(course, name)

        def timed(*args, own=own, **options):
            training = own(*args, **options)
            step = training.loss

            def loss(number):
                clock.now += 1
                if (training.name, number) in cuts:
                    cuts.remove((training.name, number))
                    raise CutError
                return step(number)

            return replace(training, loss=loss)

        monkeypatch.setattr(course, name, timed)
    cuts = []
    whole, parts = build(family), build(family)
    config = replace(CONFIG, feature_map="Centred(LearnedExponential(num_features=8))", minutes=0.2)
    expected = convert_(whole, batches, config)
    cuts += [("transfer", 0), ("transfer", 2), ("distillation", 5)]
    for _ in range(3):
        with pytest.raises(CutError):
            convert_(parts, batches, config, work=tmp_path / "work")
        assert not is_linearized(parts)
    assert not cuts
    found = convert_(parts, batches, config, work=tmp_path / "work")
    assert found == expected
    assert unchanged(parts, state(whole))
    # The same once more finds everything done.
    again = build(family)
    monkeypatch.setattr("linattn.training.loop._Run._step", None)
    assert convert_(again, batches, config, work=tmp_path / "work") == found
    assert unchanged(again, state(whole))


def test_with_more_time_a_conversion_measures_what_has_changed_and_nothing_else(
    build, batches, ticking, tmp_path, monkeypatch
):
    first = convert_(build("bert"), batches, replace(CONFIG, minutes=0.1), work=tmp_path)
    measured = []
    monkeypatch.setattr(course, "measure", lambda name, *args: measured.append(name) or measure(name, *args))
    monkeypatch.setattr(course, "measure_uniform", None)
    model = build("bert")
    found = convert_(model, batches, CONFIG, work=tmp_path)
    assert measured == ["calibrated", "converted"]
    assert names(found) == names(first) == ["uniform", "unconverted", "calibrated", "converted"]
    assert found.stages[:2] == first.stages[:2]
    assert all(ours != theirs for ours, theirs in zip(found.stages[2:], first.stages[2:], strict=True))
    with torch.no_grad():
        exact, ours = ([run(one, batches[number]) for number in (7, 15)] for one in (build("bert"), model))
    assert agreement(ours, exact) == found.result.agreement


def test_a_work_folder_takes_one_process(build, batches, ticking, tmp_path):
    model, work = build("bert"), tmp_path / "work"
    before = state(model)
    with locked(work), ThreadPoolExecutor(1) as pool, pytest.raises(InUseError, match=f"{work} is in use by another"):
        pool.submit(convert_, model, batches, CONFIG, work=work).result()
    assert unchanged(model, before)
    assert not is_linearized(model)
    convert_(model, batches, CONFIG, work=work)
    assert not (work / LOCK).exists()


def test_a_full_disk_in_a_conversion_names_its_folder(build, batches, ticking, tmp_path, monkeypatch):
    """Curves are written by TensorBoard, whose errors name nothing."""
    model, work = build("bert"), tmp_path / "work"
    before = state(model)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    with pytest.raises(OSError, match=f"No space left on device: {work} was not written; free some space"):
        convert_(model, batches, CONFIG, work=work)
    assert unchanged(model, before)
    assert not is_linearized(model)


def test_a_work_folder_takes_one_conversion(build, batches, ticking, tmp_path):
    config = replace(CONFIG, minutes=0)
    convert_(build("bert"), batches, config, work=tmp_path)
    # More time is no other conversion.
    convert_(build("bert"), batches, CONFIG, work=tmp_path)
    for changes, name in (({"seed": 1}, "seed"), ({"distil": False}, "distil"), ({"layers": (0,)}, "layers")):
        with pytest.raises(ValueError, match=re.escape(f"with other settings ({name}: ")):
            convert_(build("bert"), batches, replace(config, **changes), work=tmp_path)
    with pytest.raises(ValueError, match="samples: "):
        convert_(build("bert"), batches[::-1], config, work=tmp_path)
    other = build("bert")
    with torch.no_grad():
        other.embeddings.word_embeddings.weight[5, 5] += 1
    with pytest.raises(ValueError, match="weights: "):
        convert_(other, batches, config, work=tmp_path)
