"""Files and folders that are whole or absent, and folders held by one process at a time."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from filelock import FileLock, Timeout

# No space on the device, none in the quota (which Windows does not have), none below the limit of a file.
_FULL = [getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)]
# A name may have 255 bytes, and a character up to 4.
_MOST_CHARACTERS = 40
_MAY_FLUSH = "r+b" if os.name == "nt" else "rb"  # Windows flushes what may be written alone
LOCK = ".lock"
"""Name of the file in a folder that is held."""

# Seconds between two attempts, and until a folder counts as held elsewhere: longer than one is made and removed in.
_PAUSE, _PATIENCE = 0.01, 0.2
# Attempts at a folder that others remove again and again, before it is taken for one that cannot be made.
_MOST = 100


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name only when the block ends well, in place of an earlier one: rename(2)."""
    with _renamed_to(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder that appears under its name, with all its files, only when the block ends well: rename(2)."""
    check_new(folder)
    with _renamed_to(folder) as temporary:
        temporary.mkdir()
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open(_MAY_FLUSH) as file:
                    os.fsync(file.fileno())
        with suppress(OSError):
            folder.rmdir()  # empty: Windows renames to no folder that exists


@contextmanager
def _renamed_to(place: Path) -> Iterator[Path]:
    """A name in the same folder that no other call has, for what takes the place when the block ends well."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name[:_MOST_CHARACTERS]}.{uuid4().hex}.part")
    try:
        with full_disk_names(place):
            yield temporary
            temporary.replace(place)
    except BaseException:
        # What cannot be removed must not hide the error.
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            temporary.unlink()
        raise


def check_new(folder: Path, *, is_replaced: bool = False) -> None:
    """Refuse a name that a new folder cannot be given; with `is_replaced` one that holds files can."""
    if not folder.exists():
        return
    if not folder.is_dir() or (not is_replaced and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder; give a new folder, or remove it first")
    if Path.cwd().is_relative_to(folder.resolve()) or folder.is_mount():
        raise FileExistsError(f"{folder} is a mount point or holds the working directory; give a new folder in it")


def remove(place: Path) -> None:
    """Remove a folder, or a file or link in its place."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()


@contextmanager
def full_disk_names(path: Path) -> Iterator[None]:
    """Where the disk or a quota is full, or a file too large (write(2)), let the OSError name what was not written."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) and error.errno in _FULL else None
        if number is None:
            # Libraries in other languages, and those that copy many files, have errors with the system's words.
            number = next((one for one in _FULL if os.strerror(one) in str(error)), None)
        if number is None:
            raise
        words = f"{os.strerror(number)}: {path} was not written; free some space, or write elsewhere"
        raise OSError(number, words) from error


class InUseError(OSError):
    """A folder is held by another process, or by another thread of this one."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, alone, for as long as the block lasts; a thread that holds it may hold it again."""
    folder = folder.absolute()
    missing = [parent for parent in folder.parents if not os.path.exists(parent)]  # False also where one may not look
    # The operating system's, flock(2): it ends with its process, killed or not.
    lock = _acquired(folder)
    try:
        yield
    finally:
        is_last = lock.lock_counter == 1
        if is_last:
            # Before others can take it; on Windows, which removes no open file, releasing it does.
            with suppress(FileNotFoundError, PermissionError):
                (folder / LOCK).unlink()
        lock.release()
        with suppress(OSError):
            for place in (folder, *missing) if is_last else ():
                place.rmdir()


def _acquired(folder: Path) -> FileLock:
    """The lock of a folder, which this thread now holds."""
    # One object for each path, so that a thread's second hold is counted; the state is each thread's own.
    lock = FileLock(folder / LOCK, is_singleton=True, fallback_to_soft=False)
    for _ in range(_MOST):
        try:
            # Makes the folder too.
            lock.acquire(timeout=_PATIENCE, poll_interval=_PAUSE)
        except FileNotFoundError:
            # The process that held it has just ended, and removed the folder.
            continue
        except (FileExistsError, NotADirectoryError):  # a file is, or is above, the folder
            break
        except (Timeout, PermissionError) as error:
            if isinstance(error, PermissionError) and os.name != "nt":
                raise PermissionError(f"{folder} cannot be written: this user may not; take another folder") from None
            # Windows refuses to open a file that another process is removing.
            raise InUseError(
                f"{folder} is in use by another process; wait until that has ended, or take another folder"
            ) from None
        return lock
    raise FileNotFoundError(f"{folder} cannot be made in {folder.parent}; take another folder")
