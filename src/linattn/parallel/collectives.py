"""The two exchanges, and their mirrors in the backward pass.

Every rank calls its collectives in the same order, backward too, or all wait for ever. So each takes, and returns, the
queries beside what it sends: outputs depend on those on every rank, hence autograd comes by on every rank, the first
one too, that reads nothing of what it was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.parallel.ranks import Ranks


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
