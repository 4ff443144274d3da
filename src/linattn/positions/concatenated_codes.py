"""Codes of positions concatenated to queries and keys: sines, or learned ones; letters as in positions/__init__.py."""

from __future__ import annotations

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from linattn.feature_maps._arguments import check_count, check_number
from linattn.positions._base import Position, check_below, concatenated


class ConcatenatedCodes(Position):
    """[x; p]: a code of the position beside each query and key.

    Abstract: the concrete classes say which code. A kernel exp(scale·q·k) is multiplied by exp(scale·p_i·p_j), exactly;
    positive random features pay with variance: codes add scale·|p_i + p_j|² to s = scale·|q + k|². With an
    elementwise map φ(p_i)·φ(p_j) is merely added to every weight, whatever the content.
    """

    def __init__(self, head_dim: int, code_dim: int) -> None:
        check_count("head_dim", head_dim)
        super().__init__(head_dim, head_dim + check_count("code_dim", code_dim))
        self.code_dim = code_dim

    @abstractmethod
    def code(self, at: Tensor) -> Tensor:
        """Codes of positions: (…,) -> (…, P)."""

    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """[x; p]."""
        return concatenated(x, self.code(at))


@final
class SinusoidalCodes(ConcatenatedCodes):
    """Sines and cosines of the position beside each query and key.

        φ([q; p_i])·φ([k; p_j]),   p_i·p_j = amplitude²·Σ_l cos(ω_l (i - j)),   ω_l = base^(-2l/P)

    With a map of the softmax kernel this is a relative bias scale·p_i·p_j on the logits; |p_i|² is amplitude²·P/2 at
    every position. Cost O(L·P) and a map P wider; no longest position.

    Args:
        head_dim: D.
        code_dim: P, even.
        base: of the frequencies, > 0.
        amplitude: of each wave, ≥ 0.

    Raises:
        ValueError: a width is not a positive integer, P is odd, or a number is out of range.

    Example:
        >>> import torch
        >>> SinusoidalCodes(3, 2, amplitude=2.0).code(torch.tensor([0.0])).tolist()
        [[2.0, 0.0]]

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5, concatenated instead of added.
    """

    def __init__(self, head_dim: int, code_dim: int, *, base: float = 10_000.0, amplitude: float = 1.0) -> None:
        super().__init__(head_dim, code_dim)
        if code_dim % 2:
            raise ValueError(f"code_dim must be even, a cosine and a sine for each frequency, got {code_dim}")
        self.base, self.amplitude = check_number("base", base, positive=True), check_number("amplitude", amplitude)

    def code(self, at: Tensor) -> Tensor:
        """[cos, sin] of all frequencies, float64: (…,) -> (…, P)."""
        steps = torch.arange(0, self.code_dim, 2, dtype=torch.float64, device=at.device) / self.code_dim
        angle = at.double().unsqueeze(-1) * self.base**-steps
        return self.amplitude * torch.cat((angle.cos(), angle.sin()), -1)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.head_dim}, {self.code_dim}, base={self.base}, amplitude={self.amplitude}"


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
