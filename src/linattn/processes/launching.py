"""The processes that a launcher started, in one group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from linattn.processes.group import Processes
from linattn.processes.pulse import watched


@contextmanager
def launched() -> Iterator[Processes]:
    """The processes that a launcher (torchrun, accelerate, srun) started, in one group on gloo until the block ends.

    A launcher says so by WORLD_SIZE and RANK in the environment; without it there is one process and no group. A
    process that ends by force breaks its connections, and the others' collectives fail at once. One that is stopped,
    as by a signal or with its machine, keeps them: the others notice within 20 seconds that its pulse is missing, say
    which one it is, and end. At the end of the block all wait for each other.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(0, 1)
        return
    dist.init_process_group("gloo")
    try:
        processes = Processes.of_this_run()
        with watched(processes):
            yield processes
            dist.barrier()
    finally:
        dist.destroy_process_group()
