"""The losses of a conversion: pure functions.

Letters: B batch, H query heads, L tokens, n chosen queries, E width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def row_divergence(log_exact: Tensor, weights: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence of attention rows (B, H, n, L) from the exact ones: attention transfer's loss.

        mean over rows of  KL(p‖a) = Σ_j p_j (ln p_j - ln a_j)

    `log_exact` is ln p, -inf for keys that are not attended to; `weights` are nonnegative rows that sum to 1. A weight
    that underflowed counts as the smallest normal number of its dtype, and gets no gradient.

    Example:
        >>> exact = torch.tensor([[[[0.5, 0.5]]]]).log()
        >>> round(row_divergence(exact, torch.tensor([[[[0.25, 0.75]]]])).item(), 4)  # ½ ln 2 + ½ ln ⅔
        0.1438

    Source: Zhang et al. 2024 (arXiv 2402.04347), section 3.
    """
    attended = log_exact > -torch.inf
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

    Example:
        >>> y = torch.tensor([[[3.0, 4.0], [1.0, 1.0]]])
        >>> squared_relative_error(torch.zeros(1, 2, 2), y, torch.tensor([[True, False]])).item()
        1.0
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

    The layers before the last give every layer a target; the last alone takes several times as many steps. `mean` gives
    the mean of a number over all processes, where the texts of a step are dealt out to several.

    Example:
        >>> y, live = torch.ones(1, 1, 2), torch.tensor([[True]])
        >>> distillation([y, 0 * y], [y, y], live).item()  # ½·1 + ½·(0 + 1)/2
        0.75

    Source: Jiao et al. 2020 (arXiv 1909.10351), sections 3.1 and 3.2, states only.
    """
    errors = torch.stack(
        [squared_relative_error(ours, theirs, live, mean) for ours, theirs in zip(student, teacher, strict=True)]
    )
    loss = (errors[-1] + errors.mean()) / 2
    return loss if divergence is None else loss + divergence
