"""FAVOR+ with everything that was drawn or fixed set free to be trained; letters as in feature_maps/__init__.py."""

from __future__ import annotations

import math
from typing import final

from linattn.feature_maps._arguments import check_seed
from linattn.feature_maps._draw import draw_projection
from linattn.feature_maps._learned import Exponents, LearnedMap


@final
class LearnedExponential(LearnedMap):
    """Positive features with trainable weights, which start as those of FAVOR+.

    φ_i(x) = exp(w_i·x̃ + b_i - c_i·|x̃|²/2), x̃ = √scale·x, with w, b and c of queries apart from those of keys. At the
    start w is the draw of `FavorPlus(head_dim, num_features, seed=seed)`, b_i = -log(R)/2 and c_i = 1 on both sides:
    the same features to rounding, hence an unbiased estimate of exp(scale·q·k).

    Why c: a key's -|x̃|²/2 does not cancel in the output, so exp(W·x̃ + b) alone could not start there; and fixed at 1 it
    would tie how keys' lengths weigh to what is right in the mean over draws, where there is one draw and it is
    trained. With c_i = 1 and b_i = -|w_i|²/2 a feature is the bump exp(-|x̃ - w_i|²/2), with c_i = 0 exp(w_i·x̃ + b_i).

    `softmax_kernel` is true: the map stands for exp(scale·q·k), at the start without bias, later as well as it was
    trained to, and what it makes of some keys combines with exact attention to others. Train it as it will be used:
    without an exact part the output does not depend on a factor common to all weights of a query, so nothing keeps that
    factor where an exact part added later wants it; beside one (`exact`, `combine`) the common normaliser
    trains it too.

    Cost: O(L·R·D) time, O(L·R) memory; 2·R·(D + 2) parameters, per head with `num_heads`.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R.
        scale: factor on q·k, > 0; D**-0.5 if None.
        seed: of the draw where training starts, 0 ≤ seed < 2**63; later it says nothing.
        num_heads: one set of parameters per key/value head; one for all if None.

    Raises:
        ValueError: if a size is not a positive integer, `scale` not a positive number, or `seed` out of its range.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import FavorPlus
        >>> x = torch.tensor([[1.0, -2.0]])
        >>> learned, favor = LearnedExponential(2, 4, seed=3), FavorPlus(2, 4, seed=3)
        >>> torch.allclose(learned.key(x), favor.key(x), atol=1e-6)
        True
        >>> sum(weight.numel() for weight in learned.parameters())  # 2·4·(2 + 2)
        32

    Source: the start is Choromanski et al. 2021 (arXiv 2009.14794), lemma 1; trained exponentials of a linear map are
    those of Zhang et al. 2024 (arXiv 2402.04347), the trained coefficient of |x|² is one of Likhosherstov et al. 2022
    (arXiv 2205.15317), set free for each feature.
    """

    softmax_kernel = True

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        scale: float | None = None,
        seed: int = 0,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_features, scale=scale, num_heads=num_heads)
        self.seed = check_seed(seed)
        weight = draw_projection(
            self.seed, num_features, head_dim, draw="orthogonal", lengths="chi", num_heads=self.num_heads
        )
        constant = -math.log(num_features) / 2
        self.of_query, self.of_key = (
            Exponents(weight, scale=self.scale, bias=constant, curvature=1.0) for _ in range(2)
        )
