"""Stochastic positional encoding with sines.

Letters: B batch, H heads, L tokens, D head width, K sines of each coordinate, R realisations.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn

from linattn.feature_maps._arguments import check_count, check_seed
from linattn.positions._base import Position, Properties, wide
from linattn.softmax.precision import outside_autocast

# Frequencies start near σ(-4)/2 cycles per token, one in about a hundred tokens.
_SLOW = -4.0


@final
class SineSpe(Position):
    """SineSPE: queries and keys become random vectors whose inner product has a learned relative kernel as its mean.

        q̂_m = Σ_d q_md Q̄_d(m),   k̂_n = Σ_d k_nd K̄_d(n),   E q̂_m·k̂_n = Σ_d q_md P_d(m - n) k_nd
        P_d(δ) = Σ_k λ_dk² cos(2π f_dk δ + θ_dk),   Σ_k λ_dk² = 1

    Q̄_d(m) and K̄_d(n), vectors of R, are waves of common Gaussian noise. Their joint law depends on m - n alone, so
    that attention is relative in expectation with any map; one draw is not. The map takes vectors of width R, and its
    `scale` should be that for width D. Products are means over R realisations, of variance O(1/R). Cost O(L·D·K·R) time
    and O(L·D·K) memory. Redrawing ends the life of a `State`.

    Attributes:
        noise: (D·2K, R), float64, shared by queries, keys and heads.
        seed: of the noise.

    Args:
        head_dim: D.
        num_realizations: R.
        num_sines: K.
        num_heads: f, θ and λ of each key/value head; one set for all if None.
        seed: of the noise and of the frequencies' start.

    Raises:
        ValueError: a size is not a positive integer.

    Example:
        >>> import torch
        >>> spe = SineSpe(2, 64)
        >>> q, k = spe(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), torch.arange(3))
        >>> q.shape, bool(spe.similarity(torch.tensor(0.0)).allclose(torch.ones(1, 2).double()))
        (torch.Size([1, 1, 3, 64]), True)

    Source: Liutkus et al. 2021 (arXiv 2105.08399), section 3.1, without its gates.
    """

    properties = Properties(
        "φ(q̂)·φ(k̂), E q̂·k̂ = Σ_d q_d P_d(i - j) k_d", "O(L·D·K·R)", "both", "yes", "in expectation over its draw"
    )
    noise: Tensor

    def __init__(
        self, head_dim: int, num_realizations: int, num_sines: int = 5, *, num_heads: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(check_count("head_dim", head_dim), check_count("num_realizations", num_realizations))
        self.num_sines = check_count("num_sines", num_sines)
        self.num_heads = None if num_heads is None else check_count("num_heads", num_heads)
        generator = torch.Generator().manual_seed(check_seed(seed))
        shape = (num_heads or 1, head_dim, num_sines)
        self.frequency = nn.Parameter(_SLOW + torch.randn(shape, generator=generator))
        self.phase = nn.Parameter(torch.zeros(shape))
        self.gain = nn.Parameter(torch.ones(shape))
        self.register_buffer("noise", torch.empty(2 * head_dim * num_sines, num_realizations, dtype=torch.float64))
        self.redraw(seed)

    def redraw(self, seed: int) -> None:
        """Other noise; frequencies, phases and gains stay."""
        generator = torch.Generator().manual_seed(check_seed(seed))
        self.seed = seed
        with torch.no_grad():
            self.noise.copy_(torch.randn(self.noise.shape, generator=generator, dtype=torch.float64))

    def similarity(self, distance: Tensor) -> Tensor:
        """P_d(δ): (…,) -> (…, H or 1, D), float64, gradients included."""
        frequency, phase, gain = self._waves()
        angle = 2 * math.pi * frequency * distance.double()[..., None, None, None] + phase
        return (gain.square() * angle.cos()).sum(-1)

    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """Σ_d x_d Q̄_d(m)/√R."""
        return self._encoded(x, at, with_phase=True)

    def encode_key(self, x: Tensor, at: Tensor) -> Tensor:
        """Σ_d x_d K̄_d(n)/√R."""
        return self._encoded(x, at, with_phase=False)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.head_dim}, {self.encoded_dim}, {self.num_sines}, num_heads={self.num_heads}, seed={self.seed}"

    def _waves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Cycles per token, phases, and gains of unit square sum, (H or 1, D, K), float64."""
        gain = nn.functional.softplus(self.gain.double())
        gain = gain / gain.square().sum(-1, keepdim=True).sqrt()
        return self.frequency.double().sigmoid() / 2, self.phase.double(), gain

    def _encoded(self, x: Tensor, at: Tensor, *, with_phase: bool) -> Tensor:
        """Tokens (B, H, L, D) at positions (B or 1, 1, L) -> (B, H, L, R), in their dtype."""
        if self.num_heads is not None and x.shape[1] % self.num_heads:
            raise ValueError(
                f"SineSpe was built for num_heads={self.num_heads} key/value heads, got {x.shape[1]} heads; build it "
                "with the number of key/value heads, or None to share one set"
            )
        groups = x.shape[1] // self.num_heads if self.num_heads is not None else 1
        parts = (part.repeat_interleave(groups, 0).unsqueeze(1) for part in self._waves())
        frequency, phase, gain = parts  # (H or 1, 1, D, K)
        angle = 2 * math.pi * frequency * at[..., None, None]
        angle = angle + phase if with_phase else angle
        dtype = wide(x).dtype
        basis = (torch.cat((gain * angle.cos(), gain * angle.sin()), -1)).to(dtype)
        spread = (wide(x).unsqueeze(-1) * basis).flatten(-2)
        with outside_autocast(x.device):
            encoded = torch.matmul(spread, self.noise.to(dtype) * self.encoded_dim**-0.5)
        return encoded.to(x.dtype)
