"""Hedgehog: trained exponentials of a linear map and of its negative; letters as in feature_maps/__init__.py."""

from __future__ import annotations

from typing import final

import torch

from linattn.feature_maps._learned import LearnedMap, SignedExponents


@final
class Hedgehog(LearnedMap):
    """Features that learn to mimic softmax attention: exponentials of a trained linear map and of its negative.

    φ(x) = [exp(W·x̃ + b), exp(-W·x̃ - b)], x̃ = √scale·x, with W and b of queries apart from those of keys; at the start
    W = I and b = 0, so that the kernel is Σ_l 2·cosh(x̃_l + ỹ_l).

    This is the map as the paper writes it. Published code divides each vector's features by their sum, a softmax over
    them, so that they do not overflow. Attention here keeps exponents, which do not, and the division makes another
    kernel: a query's cancels, a key's takes away what the key's length says. The start W = I on x itself, as published,
    is scale=1.

    The kernel is not on the scale of exp(scale·q·k) (`softmax_kernel` is false), so it takes no exact part beside it;
    `LearnedExponential` does.

    Cost: O(L·D²) time, O(L·D) memory; R = 2·D, 2·D·(D + 1) parameters, per head with `num_heads`.

    Args:
        head_dim: D, the width of a query or key.
        scale: the square of the factor on queries and keys, > 0; D**-0.5 if None.
        num_heads: one set of parameters per key/value head; one for all if None.

    Raises:
        ValueError: if a size is not a positive integer, or `scale` not a positive number.

    Example:
        >>> import torch
        >>> Hedgehog(2, scale=1.0).query(torch.tensor([[3.0, -1.0]])).tolist()  # exponents [x, -x]
        [[3.0, -1.0, -3.0, 1.0]]

    Source: Zhang et al. 2024 (arXiv 2402.04347), the trainable feature map with negation.
    """

    def __init__(self, head_dim: int, *, scale: float | None = None, num_heads: int | None = None) -> None:
        super().__init__(head_dim, 2 * head_dim, scale=scale, num_heads=num_heads)
        weight = torch.eye(head_dim, device="cpu").expand(*([] if num_heads is None else [num_heads]), -1, -1)
        self.of_query, self.of_key = (SignedExponents(weight, scale=self.scale) for _ in range(2))
