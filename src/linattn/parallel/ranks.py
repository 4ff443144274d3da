"""The ranks that each hold a part of a sequence, in the order of its tokens."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Ranks(NamedTuple):
    """A dimension of a mesh, as one rank sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device  # of what is sent

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """Ranks of a mesh of one dimension; others are refused, and sequences that torch has dealt out otherwise."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; make one with "
                'init_device_mesh("cpu", (num_ranks,))'
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"a sequence is split over one dimension, got a mesh of {mesh.ndim} dimensions "
                f'{mesh.mesh_dim_names}; give one of them, as mesh["sequence"]'
            )
        _refuse_other_order()
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), torch.device(mesh.device_type))

    @property
    def is_last(self) -> bool:
        """Whether no part comes after this rank's."""
        return self.rank + 1 == self.size

    def check_lengths(self, lengths: Sequence[int], key: Tensor) -> None:
        """Refuse lengths that are not those of the ranks' parts."""
        num_keys, lengths = key.shape[2], tuple(lengths)
        if len(lengths) != self.size or lengths[self.rank] != num_keys:
            raise ValueError(
                f"lengths must say how many keys each of {self.size} ranks holds, and rank {self.rank} holds "
                f"{num_keys}, got {lengths}"
            )


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    return list(accumulate(lengths, initial=0))


def _refuse_other_order() -> None:
    """Refuse to work inside torch's `context_parallel` while that deals tokens out from both ends of a text.

    It replaces torch's attention, whose own function is a builtin; torch has no public name for either setting.
    """
    if torch.compiler.is_compiling() or inspect.isbuiltin(torch.nn.functional.scaled_dot_product_attention):
        return
    at_work = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if at_work is not None and at_work._cp_options.enable_load_balance:
        raise ValueError(
            "torch's context_parallel gives each rank tokens from both ends of a text, wanted consecutive parts in the "
            "order of the ranks; leave its block, or switch its load balancer off before it begins: "
            "torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
        )
