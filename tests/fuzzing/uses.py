"""Where a token's gradient is rounded before it is added to others: at each of its uses.

A use is what one part of a call takes a token for: keys by softmax, or keys by the map. The gradient g_i of each is
rounded to the tokens' dtype, and so are partial sums of n of them, none of which is larger than (Σ|g_i| + |Σ g_i|)/2.
With u half the distance from 1 to the next number, n roundings of that size are

    u·(Σ|g_i| + (n - 2)·(Σ|g_i| + |Σ g_i|)/2 + |Σ g_i|) = n·u·|Σ g_i| + n/2·u·(Σ|g_i| - |Σ g_i|),

the second part of which is 0 where uses agree, and where they cancel may be more than all that is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]
_CHANGES: list[Change] = []


def used(x: Tensor) -> Tensor:
    """Tokens as one use takes them."""
    return _Use.apply(x, _CHANGES[-1]) if _CHANGES else x


@contextlib.contextmanager
def changed_gradients(change: Change) -> Iterator[None]:
    """Have a token's gradient be Σ change(g_i) in truths that are computed while it lasts."""
    _CHANGES.append(change)
    try:
        yield
    finally:
        _CHANGES.pop()


class _Use(torch.autograd.Function):
    """A tensor as it is, its gradient changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None
