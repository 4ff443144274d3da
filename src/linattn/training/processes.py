"""The processes of a training, which all hold the same weights: what they average, and what they agree on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """All of them, as one sees them; a run that nothing launched is one process, for which there is nothing to do.

    Attributes:
        rank: this process's number, from 0.
        size: how many they are.
    """

    rank: int
    size: int

    @classmethod
    def of_this_run(cls) -> Processes:
        """Those of torch.distributed's default group; this one alone where there is none.

        Example:
            >>> Processes.of_this_run()
            Processes(rank=0, size=1)
        """
        if not dist.is_initialized():
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over all processes: one all-reduce for each dtype."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            by_dtype.setdefault(x.dtype, []).append(x)
        for alike in by_dtype.values():
            flat = torch.cat([x.detach().flatten() for x in alike])
            dist.all_reduce(flat)
            for x, mean in zip(alike, (flat / self.size).split([x.numel() for x in alike]), strict=True):
                x.detach().copy_(mean.view_as(x))

    def from_first(self, value: T) -> T:
        """What the first process gives; it travels pickled."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]


@contextmanager
def launched() -> Iterator[Processes]:
    """The processes that a launcher (torchrun, accelerate, srun) started, in one group on gloo until the block ends.

    A launcher says so by WORLD_SIZE and RANK in the environment; without it there is one process and no group.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(0, 1)
        return
    dist.init_process_group("gloo")
    try:
        yield Processes.of_this_run()
    finally:
        dist.destroy_process_group()
