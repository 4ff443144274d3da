"""The ranks that all tests of this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[Pool]]:
    """The pool in use, if there is one."""
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def on_ranks(_pools: list[Pool]) -> Callable[..., list]:
    """on_ranks(size, job, *arguments): what a job returns on each rank; a broken pool is replaced."""
    if not _pools or not _pools[0].is_alive:
        _pools[:] = [Pool()]
    return _pools[0].run
