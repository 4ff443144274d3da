"""The ranks that each hold a part of a sequence, in the order of its tokens; two exchanges, and their mirrors backward.

Every rank calls its collectives in the same order, backward too, or all wait for ever. So each takes, and returns, the
queries beside what it sends: outputs depend on those on every rank, hence autograd comes by on every rank, the first
one too, that reads nothing of what it was sent.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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


def gather(ranks: Ranks, x: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors of every rank, (B, …) -> (P, B, …), and the anchor; backward one reduce-scatter."""
    gathered: tuple[Tensor, Tensor] = _Gather.apply(ranks, x, anchor)
    return gathered


def exchange(
    ranks: Ranks, x: Tensor, sent: Sequence[int], received: Sequence[int], anchor: Tensor
) -> tuple[Tensor, Tensor]:
    """Numbers (Σ sent,), so many to each rank, and the numbers (Σ received,) from each; backward the way back."""
    exchanged: tuple[Tensor, Tensor] = _Exchange.apply(ranks, tuple(sent), tuple(received), x, anchor)
    return exchanged


class _Gather(torch.autograd.Function):
    """All-gather; each rank's gradients of what another sent are summed there."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Send to all."""
        ctx.ranks = ranks
        gathered = x.new_empty(ranks.size * x.shape[0], *x.shape[1:])
        dist.all_gather_single(gathered, tied(x.contiguous(), anchor), group=ranks.group)
        return gathered.unflatten(0, (ranks.size, -1)), anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum over the readers."""
        grad, of_anchor = tied(*grads), grads[1]
        total = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_single(total, grad.flatten(0, 1).contiguous(), group=ctx.ranks.group)
        return None, total, tied(of_anchor, total)


class _Exchange(torch.autograd.Function):
    """All-to-all."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, sent: tuple[int, ...], received: tuple[int, ...], x: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send to each."""
        ctx.ranks, ctx.sizes = ranks, (sent, received)
        return _swapped(ranks, tied(x, anchor), sent, received), anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients back."""
        grad, of_anchor = tied(*grads), grads[1]
        sent, received = ctx.sizes
        returned = _swapped(ctx.ranks, grad, received, sent)
        return None, None, None, returned, tied(of_anchor, returned)


def _swapped(ranks: Ranks, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """One all-to-all."""
    numbers = x.new_empty(sum(received))
    dist.all_to_all_single(numbers, x.contiguous(), list(received), list(sent), group=ranks.group)
    return numbers


def tied(x: Tensor, to: Tensor) -> Tensor:
    """The first tensor; to a compiler it depends on the second.

    A compiler moves a collective whose input is a constant into the forward pass, as on a rank that reads no state, and
    leaves out one whose result no gradient needs, as on a rank without keys; the others would wait for it.
    """
    if not torch.compiler.is_compiling():
        return x
    return x + (0 * to.sum()).nan_to_num().to(x.dtype)
