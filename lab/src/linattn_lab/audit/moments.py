"""The norms of queries and keys that decide how well random features can do, and what they predict.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PairMoments:
    """Moments of the pairs (x, y) = √scale · (q, k) that attention visits, one per head, (H,) float64."""

    query_norm: Tensor  # mean of |x|
    key_norm: Tensor  # mean of |y|
    sum_square: Tensor  # mean of |x + y|²: the exponent of positive random features' variance
    difference_square: Tensor  # mean of |x − y|²: the exponent of trigonometric features' variance


def pair_moments(
    query: Tensor, key: Tensor, *, scale: float, first_query: int = 0, is_causal: bool = False
) -> PairMoments:
    """Moments over all pairs of a query and a key visible to it, without forming the pairs.

    Mean of |x_i ± y_j|² = mean |x_i|² + mean |y_j|² ± 2 mean x_i·y_j, by running sums of y and |y|².

    Cost: O(B H L D) time and memory.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, L, D), as many tokens as queries.
        scale: factor of q·k in the exponent; must be positive.
        first_query: queries before this one are left out.
        is_causal: whether query i attends only to keys j ≤ i.

    Raises:
        ValueError: if `scale` is not positive, or queries and keys differ in number.

    Example:
        >>> x = torch.tensor([[[[1.0], [2.0]]]])
        >>> y = torch.tensor([[[[3.0], [0.0]]]])
        >>> pair_moments(x, y, scale=1.0, is_causal=True).sum_square.item()  # (4² + 5² + 2²) / 3
        15.0

    Source: arXiv 2009.14794, lemma 2, for the part the norms play.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive for √scale to exist, got {scale}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"{query.shape[2]} queries and {key.shape[2]} keys; give self-attention's, one key per query")
    x = scale**0.5 * query.double()
    y = scale**0.5 * key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    count = torch.arange(1, x.shape[2] + 1, dtype=torch.float64, device=x.device)[:, None]
    square = y.square().sum(-1, keepdim=True)
    if is_causal:
        sum_y, sum_square_y = y.cumsum(2), square.cumsum(2)
    else:
        count = torch.full_like(count, float(x.shape[2]))
        sum_y, sum_square_y = y.sum(2, keepdim=True), square.sum(2, keepdim=True).expand_as(square)
    squares = count * x.square().sum(-1, keepdim=True) + sum_square_y
    products = 2 * (x * sum_y).sum(-1, keepdim=True)
    kept = slice(first_query, None)
    pairs = count[kept].sum() * x.shape[0]
    return PairMoments(
        query_norm=torch.linalg.vector_norm(x[:, :, kept], dim=-1).mean(dim=(0, 2)),
        key_norm=torch.linalg.vector_norm(y, dim=-1).mean(dim=(0, 2)),
        sum_square=(squares + products)[:, :, kept].sum(dim=(0, 2, 3)) / pairs,
        difference_square=(squares - products)[:, :, kept].sum(dim=(0, 2, 3)) / pairs,
    )


def logit_std(log_exact: Tensor, visible: Tensor) -> Tensor:
    """How sharp a head's attention is: the standard deviation of its logits over the keys a query may see.

    τ = √ mean_i Var_j(scale · q_i·k_j); the logarithms of the weights have the same variance as the logits.

    Cost: O(B H n Lk) time and memory.

    Args:
        log_exact: (B, H, n, Lk), logarithms of the exact weights of chosen queries, −inf where not visible.
        visible: (n, Lk) bool.

    Example:
        >>> rows = torch.tensor([[[[1.0, 3.0, -torch.inf]]]])
        >>> logit_std(rows, torch.tensor([[True, True, False]])).tolist()
        [1.0]
    """
    count = visible.sum(-1, keepdim=True)
    logits = torch.where(visible, log_exact.double(), 0.0)
    mean = logits.sum(-1, keepdim=True) / count
    deviation = torch.where(visible, logits - mean, 0.0)
    return (deviation.square().sum(-1, keepdim=True) / count).mean(dim=(0, 2, 3)).sqrt()


def predicted_ratio(relative_variance: Tensor, logit_std: Tensor) -> Tensor:
    """The error of random features over the error of uniform averaging, as the norms alone predict it.

    √( V · e^{τ²} / (e^{τ²} − 1) ), V the relative variance of one kernel entry at the mean |x ± y|². Good to a factor
    of two below 3 for Gaussian queries and keys; far above 1 it says only that the map is lost, and bias it ignores.

    Cost: O(H) time and memory.

    Args:
        relative_variance: (H,) variance of a kernel estimate over its square.
        logit_std: (H,) τ, the standard deviation of the logits over keys.

    Returns:
        (H,) float64; inf where τ = 0, for then uniform averaging is exact.

    Example:
        >>> round(predicted_ratio(torch.tensor([0.5]), torch.tensor([2.0**0.5])).item(), 4)  # √(½ e² / (e² − 1))
        0.7604

    Source: the delta method on numerator and denominator; arXiv 2009.14794, lemma 2, for the variance.
    """
    spread = -torch.expm1(-logit_std.double().square())
    return (relative_variance.double() / spread).sqrt()
