"""The command `linattn convert` beside another of its kind, and without a terminal."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from linattn.cli.app import app
from linattn.cli.new_folder import finish
from linattn.cli.training_progress import training_progress
from linattn.records.files import InUseError, locked
from linattn.training import Progress

# Holds a folder until it is killed.
HOLDING = """
import sys, time
from pathlib import Path
from linattn.records.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(folder, tmp_path):
    """A function that converts a tiny model without training."""

    def of():
        text = tmp_path / "text.txt"
        text.write_text(
            "\n\n".join(f"w{a} w{b} w{a} w{b} w{a}" for a in range(14) for b in range(14)), encoding="utf-8"
        )
        words = ["convert", str(folder("bert")), str(tmp_path / "out"), "--text", str(text), "--tokens", "16"]
        result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
            app, [*words, "--map", "Taylor(order=1)", "--minutes", "0"]
        )
        text.unlink()
        return result

    return of


def test_two_conversions_into_one_folder(run, tmp_path):
    """The second is refused while the first runs; what a killed one leaves is in nobody's way."""
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    command = [sys.executable, "-c", HOLDING, str(work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        result = run()
        assert result.exit_code == 1
        assert f"another process is converting a model into {out}; wait for it, or give another OUT" in result.stderr
        process.kill()
    assert [path.name for path in tmp_path.rglob("*")] == ["out.unfinished", ".lock"]
    result = run()
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_work_is_held_until_the_model_is_written(run, tmp_path, monkeypatch):
    seen = []

    def card(*_, **__):
        with ThreadPoolExecutor(1) as pool, pytest.raises(InUseError):
            pool.submit(ExitStack().enter_context, locked(tmp_path / "out.unfinished")).result()
        seen.append((tmp_path / "out.unfinished" / ".lock").exists())
        return ""

    monkeypatch.setattr("linattn.cli.conversion.model_card", card)
    assert run().exit_code == 0
    assert seen == [True]


def written(draft):
    """A model of two files."""
    draft.mkdir()
    (draft / "model").write_text("new")
    (draft / "README.md").write_text("new")


@pytest.mark.parametrize("places", [["out"], ["out.unfinished/former"], ["out", "out.unfinished/former"]])
def test_files_beside_a_model_that_is_continued_are_kept(tmp_path, places):
    """Also after a kill between the renames, or after them."""
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    (tmp_path / "elsewhere").mkdir()
    work.mkdir()
    for place in map(tmp_path.joinpath, places):
        (place / "figures").mkdir(parents=True)
        for name in ("model", "README.md", "notes.txt", "figures/one"):
            (place / name).write_text("old")
        (place / "link").symlink_to(tmp_path / "elsewhere")
    finish(work, out, "training", written, is_continued=True)
    files = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
    assert files == {"model": "new", "README.md": "new", "notes.txt": "old", "figures/one": "old"}
    assert (out / "link").readlink() == tmp_path / "elsewhere"
    assert not list(work.iterdir())


def test_a_model_takes_the_place_of_an_empty_folder_that_nothing_is_renamed_to(tmp_path, monkeypatch):
    """As on Windows."""
    out, work, rename = tmp_path / "out", tmp_path / "out.unfinished", Path.rename

    def rename_to_none(path, target):
        assert not target.exists()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_to_none)
    work.mkdir()
    out.mkdir()
    finish(work, out, "training", written)
    assert (out / "model").read_text() == "new"


def test_a_kill_at_the_end_leaves_nothing_without_its_settings(tmp_path, monkeypatch):
    """It would be taken for that of any other work."""
    work, removed = tmp_path / "out.unfinished", []
    (work / "checkpoints").mkdir(parents=True)
    for name in ("training.json", "baseline.json", "looks.json"):
        (work / name).write_text("{}")
    monkeypatch.setattr("linattn.cli.new_folder.remove", lambda path: removed.append(path.name))
    finish(work, tmp_path / "out", "training", written)
    assert sorted(removed) == ["baseline.json", "checkpoints", "looks.json", "training.json"]
    assert removed[-1] == "training.json"


def test_a_link_to_a_model_that_is_continued(tmp_path):
    out, work, place = tmp_path / "out", tmp_path / "out.unfinished", tmp_path / "place"
    work.mkdir()
    place.mkdir()
    (place / "notes.txt").write_text("old")
    out.symlink_to(place)
    finish(work, out, "training", written, is_continued=True)
    assert (out / "notes.txt").read_text() == (place / "notes.txt").read_text() == "old"
    assert not list(work.iterdir())


@pytest.fixture
def told(monkeypatch):
    """What notifies, and the lines that it has printed, by a clock that the test moves."""
    clock, file = SimpleNamespace(now=0.0), StringIO()
    monkeypatch.setattr("linattn.cli.training_progress.time", SimpleNamespace(perf_counter=lambda: clock.now))
    console = Console(file=file, width=200)
    with training_progress(console, "Measuring and calibrating", lambda found: f"loss {found.best:.4f}") as shown:

        def at(now, name, share, best=None):
            clock.now = now
            if best is None:
                shown.measured(name, share)
            else:
                shown.notify(name, share, Progress(1, now, 9.0, best, best))
            return file.getvalue().splitlines()

        yield at


def test_the_time_that_is_left_is_told_once_in_every_quarter(told):
    begun = ["Measuring and calibrating"]
    # Nothing is known of its speed yet, and after so little nothing to speak of.
    assert told(100.0, "transfer", 0.002, 4.0) == begun
    assert told(101.0, "transfer", 0.004, 4.0) == begun
    begun.append("transfer: 10% done, loss 4.0000, about 7.5 minutes left")
    assert told(149.0, "transfer", 0.1, 4.0) == begun
    assert told(170.0, "transfer", 0.2, 3.0) == begun
    begun.append("transfer: 50% done, loss 2.0000, about 5.0 minutes left")
    assert told(398.8, "transfer", 0.5, 2.0) == begun
    begun.append("transfer: done, loss 1.0000; measuring")
    assert told(700.0, "transfer", 1.0, 1.0) == begun
    # The next has a speed of its own.
    assert told(800.0, "distillation", 0.001, 1.0) == begun
    begun.append("distillation: 5% done, loss 1.0000, about 1.9 minutes left")
    assert told(806.0, "distillation", 0.051, 1.0) == begun


def test_measurements_are_told_where_they_take_long(told):
    begun = ["Measuring and calibrating"]
    assert told(19.0, "exact", 0.5) == begun
    begun.append("Measuring: uniform, 25% done")
    assert told(20.0, "uniform", 0.25) == begun
    assert told(39.0, "uniform", 0.5) == begun
    begun.append("distillation: done, loss 1.0000; measuring")
    assert told(50.0, "distillation", 1.0, 1.0) == begun
    assert told(69.0, "converted", 0.75) == begun
    assert told(70.0, "converted", 1.0)[-1] == "Measuring: converted, 100% done"


def test_what_a_run_before_has_done_says_nothing_of_this_ones_speed(told):
    told(0.0, "transfer", 0.5, 4.0)
    # 45 seconds for a quarter.
    assert told(45.0, "transfer", 0.75, 3.0)[-1] == "transfer: 75% done, loss 3.0000, about 0.8 minutes left"
