"""One process at a time in a folder, and a lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from linattn.records.files import LOCK, InUseError, locked

# Holds a folder, says so, and waits to be told or killed.
HOLDING = """
import sys
from pathlib import Path
from linattn.records.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds a folder."""
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "work")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def hold(folder):
    with locked(folder):
        pass


def test_another_process_is_refused_until_the_first_has_ended(holder, tmp_path):
    work = tmp_path / "work"
    for _ in range(2):
        with pytest.raises(InUseError, match=f"{work} is in use by another process; wait until that has ended, or"):
            hold(work)
        # Being refused takes nothing from who holds it.
        assert [path.name for path in work.iterdir()] == [LOCK]
    holder.communicate("")
    assert holder.returncode == 0
    assert not work.exists()
    hold(work)


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    work = tmp_path / "work"
    assert [path.name for path in work.iterdir()] == [LOCK]
    with locked(work):
        (work / "kept").touch()
    assert [path.name for path in work.iterdir()] == ["kept"]


def test_a_thread_may_hold_again_what_it_holds_and_others_may_not(tmp_path):
    with locked(tmp_path / "work"):
        hold(tmp_path / "work")
        with ThreadPoolExecutor(1) as pool, pytest.raises(InUseError):
            pool.submit(hold, tmp_path / "work").result()
        assert (tmp_path / "work" / LOCK).exists()
    assert not (tmp_path / "work").exists()


def test_only_what_is_empty_is_removed_and_only_what_was_made(tmp_path):
    hold(tmp_path / "a" / "b" / "work")
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    hold(tmp_path / "a" / "b" / "work")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def interrupted():
        with locked(tmp_path / "a" / "work"):
            (tmp_path / "a" / "work" / "kept").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in (tmp_path / "a" / "work").iterdir()] == ["kept"]


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """Between opening the file and locking it, who held it has ended and removed it."""
    flock, times = fcntl.flock, []

    def removed(file, operation):
        times.append(None)
        if len(times) == 1:
            os.unlink(tmp_path / "work" / LOCK)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed)
    with locked(tmp_path / "work"):
        assert len(times) == 2
        with ThreadPoolExecutor(1) as pool, pytest.raises(InUseError):
            pool.submit(hold, tmp_path / "work").result()


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    """Between making the folder and locking it, who held it has ended and removed it."""
    mkdir, times = Path.mkdir, []

    def made(folder, **options):
        mkdir(folder, **options)
        times.append(None)
        if len(times) == 1:
            folder.rmdir()

    monkeypatch.setattr(Path, "mkdir", made)
    with locked(tmp_path / "work"):
        assert len(times) == 2


def test_a_file_system_without_locks_is_an_error(tmp_path, monkeypatch):
    def without(file, operation):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(OSError, match="Operation not supported"):
        hold(tmp_path / "work")


def test_a_folder_that_cannot_be_made_is_refused_at_once():
    """In a place that takes no folders, where making one fails as if others removed it."""
    with pytest.raises(FileNotFoundError, match=r"/proc/work cannot be made in /proc; take another folder"):
        hold(Path("/proc/work"))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_place_of_a_folder_is_refused_at_once(tmp_path, name):
    (tmp_path / "file").write_text("a report's, perhaps")
    refused = pytest.raises(FileNotFoundError, match=rf"{name} cannot be made in .*; take another folder")
    with refused, locked(tmp_path / name):
        pass
    assert (tmp_path / "file").read_text() == "a report's, perhaps"


def test_a_folder_without_the_right_to_write_is_not_called_in_use(tmp_path):
    child = os.fork()
    if child == 0:
        # A root user may write everywhere.
        if os.geteuid() == 0:
            os.seteuid(65534)
        else:
            tmp_path.chmod(0o555)
        try:
            hold(tmp_path / "work")
        except PermissionError as error:
            os._exit(0 if "work cannot be written: this user may not" in str(error) else 2)
        except BaseException:
            # A child of pytest's that went on would run all tests once more.
            os._exit(3)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
