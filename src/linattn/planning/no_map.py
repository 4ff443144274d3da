"""What stands in a feature map's place where merged keys take all keys.

Letters: L tokens, D head width.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap


@final
class NoMap(FeatureMap):
    """No map: no features, and the softmax kernel itself, at a scale of one's choice.

        kernel(q, k) = exp(scale · q·k)

    Methods without a map build it, so that costs, plans and audits have a head width, a scale and a width of 0 to go
    by. `linattn.linear_attention` takes None in its place.

    Args:
        head_dim: D.
        scale: of the method's calls; D**-0.5 if None.

    Example:
        >>> NoMap(4).num_features
        0
        >>> NoMap(2, scale=0.0).kernel(torch.ones(1, 2), torch.ones(3, 2)).tolist()
        [[1.0, 1.0, 1.0]]
    """

    exponential = True
    softmax_kernel = True

    def __init__(self, head_dim: int, scale: float | None = None) -> None:
        super().__init__(head_dim, 1)
        self.num_features = 0
        self.scale = head_dim**-0.5 if scale is None else scale

    def query(self, x: Tensor) -> Tensor:
        """Nothing: (..., L, D) -> (..., L, 0)."""
        self._check_width(x)
        return x[..., :0]

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """What merged keys approximate."""
        return torch.exp(self.scale * q @ k.mT)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.head_dim}, scale={self.scale}"
