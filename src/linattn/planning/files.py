"""Files that are either whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


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
