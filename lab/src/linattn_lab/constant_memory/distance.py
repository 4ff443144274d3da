"""How far a language model's predictions are from another's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 64


class Distance(NamedTuple):
    """Of one model's next-token distributions from another's, position by position, (n,) each in float64.

    Attributes:
        kl: KL divergence of the approximate distribution from the exact one, in nats.
        loss: negative logarithm of what the approximate one gives the next token.
        same: 1 where both have the same likeliest token.
    """

    kl: Tensor
    loss: Tensor
    same: Tensor


def distance(exact: Tensor, approximate: Tensor, following: Tensor) -> Distance:
    """How far one model is from another.

        KL_i = Σ_t p_i(t)·(log p_i(t) - log p̃_i(t))

    Cost: O(n·V).

    Args:
        exact: log p (n, V).
        approximate: log p̃ (n, V).
        following: (n,), the tokens that come next.

    Returns:
        A `Distance`.

    Example:
        >>> p = torch.tensor([[0.5, 0.5]]).log()
        >>> found = distance(p, torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0]))
        >>> round(found.kl.item(), 4), round(found.loss.exp().item(), 4)  # ½ log 2 + ½ log ⅔, and 1 / ¼
        (0.1438, 4.0)
    """
    kl = []
    for p, other in zip(exact.split(_ROWS), approximate.split(_ROWS), strict=True):
        kl.append((p.exp() * (p - other)).sum(-1, dtype=torch.float64))
    loss = -approximate.gather(-1, following.unsqueeze(-1)).squeeze(-1).double()
    same = (exact.argmax(-1) == approximate.argmax(-1)).double()
    return Distance(torch.cat(kl), loss, same)
