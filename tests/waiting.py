"""A job of two processes, one of which may stop or kill itself."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import linattn.processes
from linattn.cli.app import ERRORS, error_line
from linattn.processes import launched


def wait_for_all(rank: int, port: int, failing: int, number: int, said: Path) -> None:
    """A process of two that meet at a port; one of them sends itself a signal. What the others say goes to a file.

    A shorter timeout than in earnest; process 0 keeps the store, as under srun.
    """
    with said.open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    torch.set_num_threads(1)
    linattn.processes._TIMEOUT = timedelta(seconds=4)
    try:
        with launched() as processes:
            if processes.gather(processes.rank) != [0, 1]:
                sys.exit("no group")
            if processes.rank == failing:
                os.kill(os.getpid(), number)
            dist.barrier()
    except ERRORS as error:
        # A string is printed, and the exit code is 1.
        sys.exit(error_line(error, "train", {}))
