"""What a conversion minimises: pure functions.

Letters: B batch, H query heads, L tokens, n chosen queries, E width of a state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_divergence(log_exact: Tensor, weights: Tensor) -> Tensor:
    """How far attention rows are from the exact ones, for training a map: the loss of attention transfer.

        mean over rows of  KL(p‖a) = Σ_j p_j (ln p_j - ln a_j)

    A weight that underflowed counts as the smallest normal number of its dtype, and gets no gradient.

    Cost: O(B H n L) time and memory.

    Args:
        log_exact: (B, H, n, L), ln p; -inf where a query sees no key.
        weights: (B, H, n, L), a, rows that sum to 1, none negative.

    Returns:
        A scalar in nats, at least float32.

    Example:
        >>> exact = torch.tensor([[[[0.5, 0.5]]]]).log()
        >>> round(row_divergence(exact, torch.tensor([[[[0.25, 0.75]]]])).item(), 4)  # ½ ln 2 + ½ ln ⅔
        0.1438

    Source: Zhang et al. 2024 (arXiv 2402.04347), section 3; Kullback and Leibler 1951.
    """
    attended = log_exact > -torch.inf
    log_weights = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    # An absent pair is 0, not 0·(-inf): nan would follow it through the gradient.
    difference = torch.where(attended, log_exact, 0) - torch.where(attended, log_weights, 0)
    return (log_exact.exp() * difference).sum(-1).mean()


def squared_relative_error(student: Tensor, teacher: Tensor, live: Tensor) -> Tensor:
    """Squared error of states relative to their size, over live tokens.

        Σ ‖ŷ - y‖² / Σ ‖y‖²

    Cost: O(B L E).

    Args:
        student: (B, L, E), ŷ.
        teacher: (B, L, E), y.
        live: (B, L) bool, False for padding.

    Returns:
        A scalar; 1 for a student that says nothing.

    Example:
        >>> y = torch.tensor([[[3.0, 4.0], [1.0, 1.0]]])
        >>> squared_relative_error(torch.zeros(1, 2, 2), y, torch.tensor([[True, False]])).item()
        1.0

    Source: the definition.
    """
    y = teacher[live]
    return (student[live] - y).square().sum() / y.square().sum()


def token_divergence(student: Tensor, teacher: Tensor, live: Tensor) -> Tensor:
    """How far predictions are from the teacher's: mean over live tokens of KL(p‖p̂).

    Cost: O(B L V).

    Args:
        student: (B, L, V), logits of p̂.
        teacher: (B, L, V), logits of p.
        live: (B, L) bool, False for padding.

    Returns:
        A scalar in nats.

    Example:
        >>> teacher, student = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.25, 0.75]]]).log()
        >>> round(token_divergence(student, teacher, torch.tensor([[True]])).item(), 4)
        0.1438

    Source: Hinton et al. 2015 (arXiv 1503.02531), at temperature 1.
    """
    log_p, log_q = teacher[live].log_softmax(-1), student[live].log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def distillation(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    live: Tensor,
    *,
    student_logits: Tensor | None = None,
    teacher_logits: Tensor | None = None,
) -> Tensor:
    """The loss of end-to-end distillation: the last states, the states of all layers, and predictions if there are any.

        ½ ε(last layer) + ½ mean of ε over the layers  [+ KL of the predictions],   ε = `squared_relative_error`

    The layers in between tell every layer what it is for; the last one alone takes several times as many steps.

    Cost: O(layers · B L E + B L V).

    Args:
        student: states after every layer, each (B, L, E).
        teacher: the same of the model that is imitated.
        live: (B, L) bool, False for padding.
        student_logits: (B, L, V), or None.
        teacher_logits: (B, L, V), or None.

    Returns:
        A scalar.

    Example:
        >>> y, live = torch.ones(1, 1, 2), torch.tensor([[True]])
        >>> distillation([y, 0 * y], [y, y], live).item()  # ½·1 + ½·(0 + 1)/2
        0.75

    Source: Jiao et al. 2020 (arXiv 1909.10351), sections 3.1 and 3.2, states only.
    """
    errors = torch.stack(
        [squared_relative_error(ours, theirs, live) for ours, theirs in zip(student, teacher, strict=True)]
    )
    loss = (errors[-1] + errors.mean()) / 2
    if student_logits is None or teacher_logits is None:
        return loss
    return loss + token_divergence(student_logits, teacher_logits, live)
