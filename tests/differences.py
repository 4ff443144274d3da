"""Derivatives by finite differences, all of them in two calls: rows of a batch stand for the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STEP = 1e-6


def check_gradients(call: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """Each derivative of each output of a call, whose inputs are one row in float64, is that of finite differences.

    What `torch.autograd.gradcheck` finds number by number; a call must treat the rows of a batch alike and apart.
    """
    free = torch.cat([x.detach().flatten() for x in inputs])

    def rows(free: Tensor) -> Tensor:
        """The outputs (B, N) of rows of all inputs' numbers."""
        parts = free.split([x.numel() for x in inputs], 1)
        outs = call(*(part.unflatten(1, x.shape[1:]) for part, x in zip(parts, inputs, strict=True)))
        return torch.cat([out.flatten(1) for out in outs], 1)

    moved = STEP * torch.eye(len(free), dtype=free.dtype)
    differences = (rows(free + moved) - rows(free - moved)).detach() / (2 * STEP)
    each = free.repeat(differences.shape[1], 1).requires_grad_()
    (found,) = torch.autograd.grad(rows(each).diagonal().sum(), each)
    torch.testing.assert_close(found, differences.T, rtol=1e-3, atol=1e-5)
