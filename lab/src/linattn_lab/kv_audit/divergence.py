"""KL divergence of a language model's predictions from another's, with its tails; letters as in __init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 64


class Divergence(NamedTuple):
    """Of one model's next-token distributions from another's, position by position, (n,) each in float64."""

    kl: Tensor  # KL divergence of the approximate distribution from the exact one, in nats
    loss: Tensor  # negative logarithm of what the approximate one gives the next token
    same: Tensor  # 1 where both have the same likeliest token


class Tails(NamedTuple):
    """KL divergence over the positions of a text."""

    mean: float  # over all positions
    median: float  # of them
    high: float  # the 99 % quantile
    largest: float  # at any position


def divergence(exact: Tensor, approximate: Tensor, following: Tensor) -> Divergence:
    """How far one model is from another.

        KL_i = Σ_t p_i(t)·(log p_i(t) - log p̃_i(t)) ≥ 0

    Cost: O(n·V).

    Args:
        exact: log p (n, V).
        approximate: log p̃ (n, V).
        following: (n,), the tokens that come next.

    Returns:
        A `Divergence`; what rounding leaves below 0 is 0.

    Example:
        >>> p = torch.tensor([[0.5, 0.5]]).log()
        >>> apart = divergence(p, torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0]))
        >>> round(apart.kl.item(), 4), round(apart.loss.exp().item(), 4)  # ½ log 2 + ½ log ⅔, and 1 / ¼
        (0.1438, 4.0)
    """
    kl = []
    for p, other in zip(exact.split(_ROWS), approximate.split(_ROWS), strict=True):
        # A token that neither can follow, whose logit is -inf in some models, adds nothing.
        kl.append((p.exp() * torch.where(p == -torch.inf, 0.0, p - other)).sum(-1, dtype=torch.float64))
    loss = -approximate.gather(-1, following.unsqueeze(-1)).squeeze(-1).double()
    same = (exact.argmax(-1) == approximate.argmax(-1)).double()
    return Divergence(torch.cat(kl).clamp(min=0.0), loss, same)


def tails(kl: Tensor) -> Tails:
    """Mean, median, 99 % quantile and the largest of divergences (n,).

    Example:
        >>> tails(torch.arange(101.0)) == Tails(50.0, 50.0, 99.0, 100.0)
        True
    """
    median, high = kl.quantile(torch.tensor([0.5, 0.99], dtype=kl.dtype, device=kl.device)).tolist()
    return Tails(float(kl.mean()), median, high, float(kl.max()))
