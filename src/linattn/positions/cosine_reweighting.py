"""cosFormer's reweighting: weights of near keys over those of far ones, by the cosine of their distance.

Letters: L tokens (Lq, Lk), D head width, R features, M longest length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.feature_maps._arguments import check_count
from linattn.positions._base import Position, Properties, check_below, concatenated


@final
class CosineReweighting(Position):
    """Weights φ(q_i)·φ(k_j)·cos(π(i - j)/2M), for positions below M.

        φ'(x_p) = [φ(x)·cos(πp/2M), φ(x)·sin(πp/2M)]

    Angles lie between 0 and π/2, so nonnegative features stay nonnegative. The angle travels with queries and keys as
    two coordinates more, and `bind` gives the map that reads them. Cost: twice the features, 2·R. It needs a longest
    length, beyond which it raises: with i - j > M weights would be negative.

    Args:
        head_dim: D.
        max_length: M.

    Raises:
        ValueError: a size is not a positive integer.

    Example:
        >>> import torch, linattn
        >>> near = CosineReweighting(1, max_length=3)
        >>> relu = near.bind(linattn.feature_maps.Relu(1, floor=0.0))
        >>> q, k = near(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 3, 1), torch.arange(3))
        >>> relu.kernel(q, k).round(decimals=4).flatten().tolist()  # cos of 60, 30 and 0 degrees
        [0.5, 0.866, 1.0]

    Source: Qin et al. 2022 (cosFormer, arXiv 2202.08791), equations 9 to 12.
    """

    properties = Properties("φ(q)·φ(k)·cos(π(i - j)/2M)", "2·R features", "both", "up to M", "yes")

    def __init__(self, head_dim: int, max_length: int) -> None:
        super().__init__(check_count("head_dim", head_dim), head_dim + 2)
        self.max_length = check_count("max_length", max_length)

    def bind(self, feature_map: FeatureMap) -> FeatureMap:
        """The map of twice the features around one of width D.

        Raises:
            ValueError: the map is of another width, signed, exponential, or reads one group of features only.
        """
        if feature_map.head_dim != self.head_dim:
            raise ValueError(
                f"CosineReweighting({self.head_dim}, …) goes around a map of head_dim={self.head_dim}, got "
                f"{feature_map.head_dim}"
            )
        if feature_map.exponential or isinstance(feature_map, GroupedFeatureMap):
            raise ValueError(
                f"CosineReweighting multiplies features, got {type(feature_map).__name__}, whose features are kept as "
                "exponents or read by groups; use Relu, EluPlusOne, RandomRelu or TensorPolynomial, or rotary positions"
            )
        if not feature_map.nonnegative:
            raise ValueError(
                f"CosineReweighting wants weights of one sign, got {type(feature_map).__name__}; use Relu or EluPlusOne"
            )
        return Reweighted(feature_map)

    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """[x; cos; sin]."""
        angle = at * (math.pi / 2 / self.max_length)
        return concatenated(x, torch.stack((angle.cos(), angle.sin()), -1))

    def check_positions(self, at: Tensor) -> None:
        """Refuse positions from M on."""
        check_below(at, self.max_length, type(self).__name__)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.head_dim}, max_length={self.max_length}"


@final
class Reweighted(FeatureMap):
    """A map of features times the cosine and the sine that are the last two coordinates of its inputs."""

    def __init__(self, inner: FeatureMap) -> None:
        super().__init__(inner.head_dim + 2, 2 * inner.num_features)
        self.inner = inner

    @property
    def num_heads(self) -> int | None:
        """The inner map's, where it has one."""
        num_heads: int | None = getattr(self.inner, "num_heads", None)
        return num_heads

    def query(self, x: Tensor) -> Tensor:
        """Features of queries: (..., L, D + 2) -> (..., L, 2·R)."""
        return self._reweighted(self.inner.query(self._content(x)), x)

    def key(self, x: Tensor) -> Tensor:
        """Features of keys."""
        return self._reweighted(self.inner.key(self._content(x)), x)

    def query_log_weight(self, x: Tensor) -> Tensor | None:
        """The inner map's."""
        return self.inner.query_log_weight(self._content(x))

    def key_log_weight(self, x: Tensor) -> Tensor | None:
        """The inner map's."""
        return self.inner.key_log_weight(self._content(x))

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """The inner kernel times the cosine of the angle between the waves, in float64."""
        waves = q[..., -2:].double() @ k[..., -2:].double().mT
        return self.inner.kernel(self._content(q), self._content(k)) * waves

    def call_tensors(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None, is_causal: bool
    ) -> Mapping[str, Tensor]:
        """The inner map's."""
        content = (self._content(query), self._content(key))
        tensors = self.inner.call_tensors(*content, key_mask=key_mask, is_causal=is_causal)
        return {f"inner.{name}": tensor for name, tensor in tensors.items()}

    def _content(self, x: Tensor) -> Tensor:
        """The input without its wave."""
        self._check_width(x)
        return x[..., :-2]

    @staticmethod
    def _reweighted(phi: Tensor, x: Tensor) -> Tensor:
        """[φ·cos, φ·sin]."""
        wave = x[..., -2:].to(phi.dtype)
        return torch.cat((phi * wave[..., :1], phi * wave[..., 1:]), -1)
