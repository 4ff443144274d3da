"""What a release is made of: versions, contents and size of the wheel, and a wheel that computes by itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from snippets import ROOT

# The wheel is built once.
pytestmark = pytest.mark.xdist_group("release")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """tests/release.py."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "tests" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(release: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    release.build(folder)
    return folder


def test_all_files_have_the_version_of_the_source(release: ModuleType) -> None:
    assert list(release.wrong_versions()) == []


def test_the_wheel_holds_the_library_whole_and_nothing_else(release: ModuleType, built: Path) -> None:
    assert list(release.wrong_contents(release.wheel_in(built))) == []


def test_the_laboratory_s_wheel_holds_its_sources_and_its_commands(release: ModuleType, built: Path) -> None:
    wheel = release.wheel_in(built, "linattn_lab")
    assert list(release.wrong_contents(wheel, release.LAB / "src")) == []
    with zipfile.ZipFile(wheel) as archive:
        (entries,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert archive.read(entries).decode().split() == [
            "[linattn.commands]",
            "lab",
            "=",
            "linattn_lab.commands:COMMANDS",
        ]


def test_the_kernels_wheel_holds_its_sources(release: ModuleType, built: Path) -> None:
    wheel = release.wheel_in(built, "linattn_triton")
    assert list(release.wrong_contents(wheel, release.GPU / "src")) == []
    with zipfile.ZipFile(release.wheel_in(built)) as library:
        assert not [name for name in library.namelist() if "kernels" in name]


def test_a_file_too_many_and_one_too_few_are_told_and_the_size(release, built, tmp_path, monkeypatch) -> None:
    wheel = release.wheel_in(built)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(tmp_path / wheel.name, "w") as new:
        for name in old.namelist():
            if name not in ("linattn/cli/app.py", "linattn/py.typed"):
                new.writestr(name, old.read(name))
        new.writestr("linattn/notes.txt", "")
    told = "\n".join(release.wrong_contents(tmp_path / wheel.name))
    assert "lacks linattn/cli/app.py" in told
    assert "holds linattn/notes.txt, which is no source" in told
    assert "no checker would read its types" in told
    monkeypatch.setattr(release, "LARGEST_WHEEL", 1000)
    assert "wanted at most 1,000: MISSED" in release.size_words(wheel)


@pytest.fixture(scope="module")
def run(release: ModuleType, built: Path, tmp_path_factory: pytest.TempPathFactory):
    """Run lines of Python with the wheel, unpacked into a folder of its own, beside a torch that is installed."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(release.wheel_in(built)) as archive:
        archive.extractall(folder)
    found = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(Path(torch.__file__).parents[1])!r}]; "

    def run(lines: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-c", found + lines]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    return run


def test_the_wheel_computes_without_its_sources(release: ModuleType, run) -> None:
    ended = run(release._COMPUTES)
    assert ended.returncode == 0, ended.stderr
    assert "unpacked" in ended.stdout


def test_the_wheel_says_what_its_kernels_for_gpus_need(release: ModuleType, run) -> None:
    """In the words that a release is held to."""
    hidden = "sys.modules['linattn_triton'] = None; "
    ended = run(hidden + release._KERNELS)
    assert ended.returncode == 1
    assert release._KERNELS_SAID in ended.stderr
