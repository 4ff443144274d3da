"""A file or folder appears whole, in one step, or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from linattn.records import files
from linattn.records.files import atomic_file, atomic_folder, check_new, full_disk_names


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_appears_with_all_its_files(tmp_path):
    with atomic_folder(tmp_path / "a" / "new") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("whole")
        assert not (tmp_path / "a" / "new").exists()
    assert names(tmp_path) == ["a", "a/new", "a/new/inner", "a/new/inner/file"]


def test_where_only_what_may_be_written_is_flushed_and_nothing_renamed_to_a_folder(tmp_path, monkeypatch):
    """As on Windows."""
    flush, rename = os.fsync, Path.replace

    def flush_writable(number):
        assert fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        flush(number)

    def rename_to_none(path, target):
        assert not target.is_dir()
        return rename(path, target)

    monkeypatch.setattr(files, "_MAY_FLUSH", "r+b")
    monkeypatch.setattr(os, "fsync", flush_writable)
    monkeypatch.setattr(Path, "replace", rename_to_none)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with atomic_folder(tmp_path / name) as folder:
            (folder / "file").write_text("whole")
    assert names(tmp_path) == ["empty", "empty/file", "new", "new/file"]
    (tmp_path / "plan").mkdir()
    with pytest.raises(AssertionError), atomic_file(tmp_path / "plan"):
        pass


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_early_end_leaves_nothing(tmp_path, end):
    def interrupted() -> None:
        with atomic_folder(tmp_path / "new") as folder:
            (folder / "file").write_text("half")
            raise end

    with pytest.raises(end):
        interrupted()
    assert names(tmp_path) == []


def test_two_at_once_do_not_meet(tmp_path):
    """The second to end finds the first's folder, and refuses."""

    def both() -> None:
        with atomic_folder(tmp_path / "new") as first, atomic_folder(tmp_path / "new") as second:
            assert first != second
            (first / "one").write_text("1")
            (second / "two").write_text("2")

    with pytest.raises(OSError, match="not empty"):
        both()
    assert names(tmp_path) == ["new", "new/two"]


@pytest.mark.parametrize("place", ["here", "here/..", "new"])
def test_a_folder_that_cannot_be_replaced_is_refused_at_once(tmp_path, monkeypatch, place):
    """The working directory, one that holds it, and a mount point."""
    (tmp_path / "here").mkdir()
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda folder: folder == tmp_path / "new")
    with pytest.raises(FileExistsError, match="is a mount point or holds the working directory"):
        check_new(tmp_path / place, is_replaced=True)
    check_new(tmp_path / "other")


def test_two_writers_of_a_file_do_not_meet(tmp_path):
    """Each writes a whole file, and the last to end is the one that stays."""
    path = tmp_path / "plan.json"
    with atomic_file(path) as first:
        first.write("[1, ")
        with atomic_file(path) as second:
            second.write("[2]")
        assert path.read_text() == "[2]"
        first.write("1]")
    assert path.read_text() == "[1, 1]"
    assert names(tmp_path) == ["plan.json"]


def test_threads_that_write_one_file_leave_one_of_theirs(tmp_path):
    path, contents = tmp_path / "plan.json", [[number] * 5000 for number in range(4)]

    def write(content: list[int]) -> None:
        for _ in range(5):
            with atomic_file(path) as file:
                json.dump(content, file)
            assert json.loads(path.read_text()) in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert names(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_early_end_leaves_the_file_before(tmp_path, end):
    path = tmp_path / "file"
    path.write_text("before")

    def interrupted() -> None:
        with atomic_file(path) as file:
            file.write("half")
            raise end

    with pytest.raises(end):
        interrupted()
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("inner", [False, True])
def test_a_full_disk_is_told_by_the_name_that_is_not_written(tmp_path, monkeypatch, inner):
    """Also where one is written within the other, whose own name nobody knows."""
    monkeypatch.setattr(os, "fsync", full)

    def write() -> None:
        if inner:
            with atomic_folder(tmp_path / "new") as folder, atomic_file(folder / "file") as file:
                file.write("half")
        with atomic_file(tmp_path / "new") as file:
            file.write("half")

    with pytest.raises(OSError, match="No space left") as caught:
        write()
    assert caught.value.errno == errno.ENOSPC
    words = f"No space left on device: {tmp_path / 'new'} was not written; free some space, or write elsewhere"
    assert str(caught.value) == f"[Errno {errno.ENOSPC}] {words}"
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_keeps_the_file_before(tmp_path, monkeypatch, number):
    path = tmp_path / "file"
    path.write_text("before")

    def replace(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="was not written") as caught, atomic_file(path) as file:
        file.write("after")
    assert caught.value.errno == number
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", [RuntimeError, shutil.Error])
def test_errors_of_other_libraries_about_a_full_disk(tmp_path, kind):
    """Their words are the system's, their classes their own."""
    with pytest.raises(OSError, match=f"{tmp_path} was not written"), full_disk_names(tmp_path):
        raise kind("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(kind, match=r"^broken$"), full_disk_names(tmp_path):
        raise kind("broken")
    with pytest.raises(FileNotFoundError), full_disk_names(tmp_path):
        (tmp_path / "missing").read_text()


def test_a_name_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("é" * 127)
    with atomic_file(path) as file:
        file.write("whole")
    assert path.read_text() == "whole"
