"""A job of two processes, one of which may stop itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from linattn.processes import launched, pulse


def wait_for_all(rank: int, port: int, stopped: int, said: Path) -> None:
    """A process of two that meet at a port; one of them stops itself. What the others say goes to a file.

    Fewer beats than in earnest are waited for; process 0 keeps the store, as under srun.
    """
    with said.open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    torch.set_num_threads(1)
    pulse._PATIENCE = 4
    with launched() as processes:
        if processes.gather(processes.rank) != [0, 1]:
            sys.exit("no group")
        if processes.rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
