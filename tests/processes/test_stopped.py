"""A process that is stopped, not killed, keeps its connections: the others notice, name it and end."""

from __future__ import annotations

import socket
import time
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import pytest

from apart import FORKED
from waiting import wait_for_all

pytestmark = pytest.mark.xdist_group("ranks")
SECONDS = 40


@pytest.fixture
def start(tmp_path):
    """A function that starts two processes of one group, of which one stops itself, -1 for none; and their files."""
    started = []

    def of(stopped: int) -> list[tuple[Process, Path]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        files = [tmp_path / f"{stopped} {rank}" for rank in range(2)]
        group = [FORKED.Process(target=wait_for_all, args=(rank, port, stopped, files[rank])) for rank in range(2)]
        for process in group:
            process.start()
        started.extend(group)
        return list(zip(group, files, strict=True))

    yield of
    for process in started:
        process.kill()
        process.join()


def test_a_stopped_process_is_named(start):
    begun = time.monotonic()
    # Both at once: a wait of four seconds each.
    groups = {stopped: start(stopped) for stopped in (0, 1)}
    for stopped, named in ((1, "process 1 of 2"), (0, "kept by the launcher or by process 0,")):
        group = groups[stopped]
        other, file = group[1 - stopped]
        other.join(SECONDS)
        said = file.read_text(encoding="utf-8")
        assert other.exitcode == 1, said
        assert f"{named} gives no sign of life for 4 s" in said
        assert f"process {1 - stopped} ends. Start again" in said
        assert time.monotonic() - begun >= 4
        assert group[stopped][0].exitcode is None


def test_processes_that_are_well_end_together(start):
    for process, file in start(-1):
        process.join(SECONDS)
        said = file.read_text(encoding="utf-8")
        assert (process.exitcode, "linattn:" in said) == (0, False), said
