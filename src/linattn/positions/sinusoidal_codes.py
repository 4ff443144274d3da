"""Sinusoidal codes concatenated to queries and keys."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from linattn.feature_maps._arguments import check_number
from linattn.positions._base import Properties
from linattn.positions._concatenated import ConcatenatedCodes


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
        amplitude: of each wave, ≥ 0; `extra_square` says what it costs.

    Raises:
        ValueError: a width is not a positive integer, P is odd, or a number is out of range.

    Example:
        >>> import torch
        >>> SinusoidalCodes(3, 2, amplitude=2.0).code(torch.tensor([0.0])).tolist()
        [[2.0, 0.0]]

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5, concatenated instead of added.
    """

    properties = Properties(
        "φ([q; p_i])·φ([k; p_j]), p sines",
        "O(L·P), a map P wider",
        "both",
        "yes",
        "for kernels of q·k",
    )

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
