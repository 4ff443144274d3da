"""Processes that are ranks of gloo groups, started once for all tests; a job that does not end in time is killed."""

from __future__ import annotations

import datetime
import gc
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from apart import FORKED

SIZES = (2, 3, 4)
NUM_RANKS = max(SIZES)
# Of a collective; and of a job, in which one may fail.
_COLLECTIVE_SECONDS, _JOB_SECONDS = 30, 60


class Pool:
    """Ranks of one world; jobs run on all of them, or on the first two or three."""

    def __init__(self, num_ranks: int = NUM_RANKS) -> None:
        self._folder = tempfile.TemporaryDirectory()
        pipes = [FORKED.Pipe() for _ in range(num_ranks)]
        self._ends = [own for own, _ in pipes]
        store = Path(self._folder.name) / "store"
        self._ranks = [
            FORKED.Process(target=_serve, args=(rank, num_ranks, store, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self._ranks:
            process.start()
        self._answers(self._ends)

    def run(self, size: int | tuple[int, ...], job: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What job(mesh, *arguments, **options) returns on each rank of a mesh of this size or shape."""
        shape = (size,) if isinstance(size, int) else size
        ends = self._ends[: torch.Size(shape).numel()]
        for end in ends:
            end.send((shape, job, arguments, options))
        return self._answers(ends)

    def _answers(self, ends: list[Connection]) -> list[Any]:
        """One answer of each rank; after an error, or too long a time, there is no pool any more."""
        answers: dict[int, Any] = {}
        while len(answers) < len(ends):
            ready = wait([end for number, end in enumerate(ends) if number not in answers], timeout=_JOB_SECONDS)
            for number, end in enumerate(ends):
                if end in ready:
                    failed, answers[number] = end.recv()
                    if failed:
                        self.close()
                        raise RuntimeError(f"rank {number}: {answers[number]}")
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(set(range(len(ends))) - set(answers))} did not answer")
        return [answers[number] for number in range(len(ends))]

    @property
    def is_alive(self) -> bool:
        """Whether it takes jobs."""
        return all(process.is_alive() for process in self._ranks)

    def close(self) -> None:
        """End the ranks."""
        for process in self._ranks:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, num_ranks: int, store: Path, pipe: Connection) -> None:
    """Answer jobs."""
    torch.set_num_threads(1)
    # As for the tests themselves: a training's look for garbage would go through all that was imported, on every rank.
    gc.freeze()
    limit = datetime.timedelta(seconds=_COLLECTIVE_SECONDS)
    shared = dist.FileStore(str(store), num_ranks)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=num_ranks, timeout=limit)
    meshes = _meshes(rank, num_ranks, limit)
    pipe.send((False, rank))
    while True:
        shape, job, arguments, options = pipe.recv()
        try:
            torch.manual_seed(0)
            # A training would look for garbage among all that earlier jobs have left, too.
            gc.freeze()
            answer = False, job(meshes[shape], *arguments, **options)
        # Whatever a job raises fails its test, in the process that asked, and leaves this rank to serve the next.
        except Exception:
            answer = True, traceback.format_exc()
        pipe.send(answer)


def _meshes(rank: int, num_ranks: int, limit: datetime.timedelta) -> dict[tuple[int, ...], DeviceMesh]:
    """A mesh of each shape of which the rank is one, whose collectives are given up in time."""

    def group(*members: int) -> dist.ProcessGroup:
        return dist.new_group(list(members), timeout=limit)

    found = {}
    for size in range(2, num_ranks + 1):
        members = group(*range(size))
        if rank < size:
            found[size,] = DeviceMesh.from_group(members, "cpu", mesh_dim_names=("sequence",))
    if num_ranks < NUM_RANKS:
        return found
    rows, columns = [group(0, 1), group(2, 3)], [group(0, 2), group(1, 3)]
    own = [columns[rank % 2], rows[rank // 2]]
    grid = torch.arange(NUM_RANKS).view(2, 2)
    found[2, 2] = DeviceMesh.from_group(own, "cpu", mesh=grid, mesh_dim_names=("data", "sequence"))
    return found
