"""One process at a time in a folder."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
"""Name of the file in a folder that is held."""

_ATTEMPTS = 100
# The folders that a thread of this process holds, so that what it calls may hold them too.
_held: set[tuple[Path, int]] = set()


class InUseError(OSError):
    """A folder is held by another process, or by another thread of this one."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for as long as the block lasts; no other process, and no other thread, can hold it meanwhile.

    The lock is the operating system's and ends with its process, killed or not: what a kill leaves of it blocks
    nobody. A thread that holds a folder may hold it again. A folder in which nothing is left at the end is removed.

    Cost: opening a file.

    Args:
        folder: made if it is missing, its parents too.

    Returns:
        A context manager.

    Raises:
        InUseError: if the folder is held elsewhere; nothing waits.
        OSError: if the folder cannot be made, or its file system has no locks.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "work"
        >>> with locked(folder):
        ...     [name.name for name in folder.iterdir()]
        ['.lock']
        >>> folder.exists()
        False

    Source: flock(2); Microsoft's documentation of _locking.
    """
    folder = folder.absolute()
    mine = folder, threading.get_ident()
    if mine in _held:
        yield
        return
    missing = [parent for parent in folder.parents if not parent.exists()]
    file = _acquire(folder)
    _held.add(mine)
    try:
        yield
    finally:
        _held.discard(mine)
        _release(folder, file)
        with suppress(OSError):
            for place in (folder, *missing):
                place.rmdir()


def _acquire(folder: Path) -> BinaryIO:
    """The open file of a lock that is now this thread's."""
    path = folder / LOCK
    for _ in range(_ATTEMPTS):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:
            # The process that held it has just ended, and removed the folder.
            continue
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            file.close()
            raise InUseError(
                f"{folder} is in use by another process; wait until that has ended, or take another folder"
            ) from None
        except BaseException:
            file.close()
            raise
        # A file that was removed meanwhile locks nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()
    raise InUseError(f"{folder} is being made and removed by other processes; wait until they have ended")


def _lock(file: BinaryIO) -> None:
    """Lock an open file, or raise at once."""
    if sys.platform == "win32":
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release(folder: Path, file: BinaryIO) -> None:
    """Remove the lock; Windows removes no file that is open, and none that another process has opened."""
    if sys.platform == "win32":
        file.close()
        with suppress(PermissionError):
            (folder / LOCK).unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        (folder / LOCK).unlink()
    file.close()
