"""One process at a time in a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
"""Name of the file in a folder that is held."""

# Seconds between two attempts, and until a folder counts as held elsewhere: longer than one is made and removed in.
_PAUSE, _PATIENCE = 0.01, 0.2
# Attempts at a folder that others remove again and again, before it is taken for one that cannot be made.
_MOST = 100


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
