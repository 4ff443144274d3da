"""Learned codes concatenated to queries and keys."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from linattn.feature_maps._arguments import check_count, check_number
from linattn.positions._base import Properties, check_below
from linattn.positions._concatenated import ConcatenatedCodes


@final
class LearnedCodes(ConcatenatedCodes):
    """A trained code of each position beside queries and keys.

        φ([q; p_i])·φ([k; p_j])

    Absolute: nothing ties p_i·p_j to i - j. Cost O(L·P) and a map P wider; memory max_length·P numbers.

    Attributes:
        codes: the parameter, (max_length, P), float32, drawn from N(0, amplitude²) by a generator of its own.

    Args:
        head_dim: D.
        code_dim: P.
        max_length: how many positions there are; one beyond is refused.
        amplitude: deviation of the start, ≥ 0.
        seed: of the start.

    Raises:
        ValueError: a size is not a positive integer, or `amplitude` is out of range.

    Example:
        >>> import torch
        >>> LearnedCodes(3, 2, max_length=4).code(torch.tensor([0, 3])).shape
        torch.Size([2, 2])

    Source: Gehring et al. 2017 (arXiv 1705.03122), section 3.1, concatenated instead of added.
    """

    properties = Properties("φ([q; p_i])·φ([k; p_j]), p learned", "O(L·P), a map P wider", "both", "up to M", "no")

    def __init__(
        self, head_dim: int, code_dim: int, *, max_length: int, amplitude: float = 0.02, seed: int = 0
    ) -> None:
        super().__init__(head_dim, code_dim)
        self.max_length = check_count("max_length", max_length)
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(max_length, code_dim, generator=generator)
        self.codes = nn.Parameter(start * check_number("amplitude", amplitude))

    def code(self, at: Tensor) -> Tensor:
        """Rows of the table: (…,) -> (…, P)."""
        return self.codes[at.long()]

    def check_positions(self, at: Tensor) -> None:
        """Refuse positions beyond the table."""
        check_below(at, self.max_length, type(self).__name__)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.head_dim}, {self.code_dim}, max_length={self.max_length}"
