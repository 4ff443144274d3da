"""Files and folders that are either whole or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name only when the block ends well.

    Written beside its place under a temporary name, then renamed, which replaces an earlier file in one step.

    Cost: that of writing.

    Args:
        path: the file's name; its folder is made if it is missing.

    Returns:
        A context manager that yields the open file, UTF-8.

    Raises:
        OSError: if the folder cannot be made or written to. Whatever ends the block early, an interrupt included,
            leaves `path` as it was and no temporary file.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replacing(folder / "a.txt") as file:
        ...     _ = file.write("whole")
        >>> [name.name for name in folder.iterdir()]
        ['a.txt']

    Source: POSIX rename(2).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder that appears under its name, with all its files, only when the block ends well.

    Filled beside its place under a temporary name, then renamed in one step.

    Cost: that of writing.

    Args:
        folder: the name, of nothing yet or of an empty folder; its parent is made if it is missing.

    Returns:
        A context manager that yields the folder to write into.

    Raises:
        FileExistsError: if there is a file of that name, or a folder that is not empty.
        OSError: if the folder cannot be made or written to. Whatever ends the block early, an interrupt included,
            leaves nothing under the name and no temporary folder.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "new"
        >>> with appearing(place) as folder:
        ...     _ = (folder / "a.txt").write_text("whole")
        ...     place.exists()
        False
        >>> [name.name for name in place.iterdir()]
        ['a.txt']

    Source: POSIX rename(2).
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder; give a new folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex}.part")
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _reach_the_disk(path)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _reach_the_disk(path: Path) -> None:
    """Wait until a file's bytes are where a loss of power leaves them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
