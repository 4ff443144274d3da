"""A process that ends by force, or is stopped and keeps its connections: the others say so and end."""

from __future__ import annotations

import signal
import socket
import time
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import pytest

from apart import FORKED
from waiting import wait_for_all

pytestmark = pytest.mark.xdist_group("ranks")
SECONDS = 40
STOP, KILL = signal.SIGSTOP, signal.SIGKILL


@pytest.fixture
def start(tmp_path):
    """A function that starts two processes of one group, of which one sends itself a signal; and their files."""
    started = []

    def of(failing: int, number: int) -> list[tuple[Process, Path]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        files = [tmp_path / f"{failing} {number} {rank}" for rank in range(2)]
        group = [
            FORKED.Process(target=wait_for_all, args=(rank, port, failing, number, files[rank])) for rank in range(2)
        ]
        for process in group:
            process.start()
        started.extend(group)
        return list(zip(group, files, strict=True))

    yield of
    for process in started:
        process.kill()
        process.join()


def test_the_others_of_a_process_that_fails_end(start):
    begun = time.monotonic()
    # All at once: a wait of four seconds each.
    groups = {(failing, number): start(failing, number) for failing in (0, 1) for number in (STOP, KILL)}
    for (failing, number), group in groups.items():
        other, file = group[1 - failing]
        other.join(SECONDS)
        said = " ".join(file.read_text(encoding="utf-8").split())
        assert other.exitcode == 1, said
        assert said.startswith("linattn train"), said
        assert "another process has ended, or is stopped: run the same command again to resume" in said
        assert ("Timed out waiting" in said) == (number == STOP)
        if number == STOP:
            assert time.monotonic() - begun >= 4
            assert group[failing][0].exitcode is None


def test_processes_that_are_well_end_together(start):
    for process, file in start(-1, STOP):
        process.join(SECONDS)
        said = file.read_text(encoding="utf-8")
        assert (process.exitcode, "linattn train" in said) == (0, False), said
