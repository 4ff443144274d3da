"""A folder that another thread holds, as another process would."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from linattn.records.files import locked


@contextmanager
def locked_elsewhere(folder: Path) -> Iterator[None]:
    """Hold a folder for as long as the block lasts."""
    with ThreadPoolExecutor(1) as thread, ExitStack() as opened:
        thread.submit(opened.enter_context, locked(folder)).result()
        yield
        thread.submit(opened.close).result()
