"""The losses of a conversion: pure functions.

Letters: B batch, H query heads, L tokens, n chosen queries, E width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def row_divergence(log_exact: Tensor, weights: Tensor) -> Tensor:
    """Mean of KL(p‖a) over attention rows a (B, H, n, L) beside exact ones, ln p; -inf for keys not attended to.

    Source: Zhang et al. 2024 (arXiv 2402.04347), section 3.
    """
    attended = log_exact > -torch.inf
    # A weight that underflowed counts as the smallest normal number, and gets no gradient.
    log_weights = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    # An absent pair is 0, not 0·(-inf): nan would follow it through the gradient.
    difference = torch.where(attended, log_exact, 0) - torch.where(attended, log_weights, 0)
    return (log_exact.exp() * difference).sum(-1).mean()


Mean = Callable[[Tensor], Tensor]
"""The mean of a number over all processes, each of which has it of its own texts."""


def itself(x: Tensor) -> Tensor:
    """Return x, the mean over one process."""
    return x


def squared_relative_error(student: Tensor, teacher: Tensor, live: Tensor, mean: Mean = itself) -> Tensor:
    """Σ ‖ŷ - y‖² / Σ ‖y‖² of states (B, L, E) over the tokens that `live` (B, L) does not mark as padding.

    With `mean`, Σ ‖y‖² is its mean over all processes, so that the mean of their errors is that of all texts at once.
    """
    y = teacher[live]
    return (student[live] - y).square().sum() / mean(y.square().sum())


def distillation(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    live: Tensor,
    divergence: Tensor | None = None,
    mean: Mean = itself,
) -> Tensor:
    """The loss of end-to-end distillation, of the states (B, L, E) after every layer and the predictions, if any.

        ½ ε(last layer) + ½ mean of ε over the layers  [+ divergence],   ε = `squared_relative_error`

    The layers before the last give every layer a target; the last alone takes several times as many steps.

    Source: Jiao et al. 2020 (arXiv 1909.10351), sections 3.1 and 3.2, states only.
    """
    errors = torch.stack(
        [squared_relative_error(ours, theirs, live, mean) for ours, theirs in zip(student, teacher, strict=True)]
    )
    loss = (errors[-1] + errors.mean()) / 2
    return loss if divergence is None else loss + divergence
