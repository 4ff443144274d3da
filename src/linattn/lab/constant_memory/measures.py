"""How far a language model is from another: KL divergence, perplexity, and the errors of its heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.hf import AttentionCall
from linattn.planning.measures import relative_error

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


class Bins(NamedTuple):
    """Consecutive stretches of a text.

    Attributes:
        ends: where each ends, in tokens, ascending; the first begins at 0.
    """

    ends: tuple[int, ...]

    @classmethod
    def of(cls, num_tokens: int) -> Bins:
        """Stretches that double in length, the last ending with the text: the first are where little is lost.

        Example:
            >>> Bins.of(4096).ends
            (256, 512, 1024, 2048, 3072, 4096)
        """
        small = [size for size in (256, 512, 1024, 2048) if size < num_tokens]
        more = list(range(3072, num_tokens, 1024)) if num_tokens > 2048 else []
        return cls((*small, *more, num_tokens))

    def means(self, positions: Tensor, values: Tensor) -> list[float]:
        """The mean of values (n,) within each stretch; nan where none is measured."""
        found, start = [], 0
        for end in self.ends:
            inside = values[(positions >= start) & (positions < end)]
            found.append(float(inside.mean()) if len(inside) else math.nan)
            start = end
        return found


def head_errors(calls: Sequence[AttentionCall], outputs: Sequence[Tensor], first: int) -> list[list[float]]:
    """Relative Frobenius errors of each layer's heads, over queries from `first` on."""
    return [
        relative_error(out[:, :, first:].double(), call.softmax()[:, :, first:].double()).flatten().tolist()
        for call, out in zip(calls, outputs, strict=True)
    ]
