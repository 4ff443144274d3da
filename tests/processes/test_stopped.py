"""A process that is stopped, not killed, keeps its connections: the others notice, name it and end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.xdist_group("ranks")
SECONDS = 40
# Fewer beats than in earnest are waited for; process 0 keeps the store, as under srun.
WORK = """
import os, signal, sys
import torch.distributed as dist
from linattn.processes import launched, pulse
pulse._PATIENCE = 4
with launched() as processes:
    if processes.gather(processes.rank) != [0, 1]:
        sys.exit("no group")
    if processes.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
"""


def start(stopped: int) -> list[subprocess.Popen]:
    """Two processes of one group, of which one stops itself; -1 for none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(stopped)],
            env=shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(("stopped", "named"), [(1, "process 1 of 2"), (0, "kept by the launcher or by process 0,")])
def test_a_stopped_process_is_named(stopped, named):
    group = start(stopped)
    try:
        other, begun = group[1 - stopped], time.monotonic()
        # Raises if it takes longer.
        _, said = other.communicate(timeout=SECONDS)
        assert other.returncode == 1, said
        assert f"{named} gives no sign of life for 4 s" in said
        assert f"process {1 - stopped} ends. Start again" in said
        assert time.monotonic() - begun >= 4
        assert group[stopped].poll() is None
    finally:
        for process in group:
            process.kill()
            process.communicate()


def test_processes_that_are_well_end_together():
    for process in start(-1):
        _, said = process.communicate(timeout=SECONDS)
        assert (process.returncode, "linattn:" in said) == (0, False), said
