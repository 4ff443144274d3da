"""Maps around a map for the softmax kernel: the inner map, its inputs, its fit.

Letters: L tokens (Lq, Lk), D head width.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from linattn.feature_maps._base import FeatureMap
from linattn.feature_maps._fitted import FittedMap
from linattn.feature_maps._grouped import GroupedFeatureMap


class Wrapper(FittedMap):
    """A map that moves queries and keys before another map sees them, and keeps the softmax kernel.

    Abstract: the concrete maps say how. exp(c·q·k), c the inner map's scale, is the inner kernel of what `inner_query`
    and `inner_key` give, times weights of one query and of one key.

    Args:
        inner: a map with `softmax_kernel`.

    Raises:
        TypeError: if `inner` does not stand for the softmax kernel.
    """

    softmax_kernel = True
    inner: FeatureMap

    def __init__(self, inner: FeatureMap) -> None:
        if not isinstance(inner, FeatureMap) or not inner.softmax_kernel:
            raise TypeError(
                f"{type(self).__name__} wants a map for the softmax kernel, got {inner!r}: for other kernels moving q "
                "and k changes the kernel; use FavorPlus, Hyperbolic, Oprf, Sderf, Nystrom, Trigonometric or Taylor"
            )
        if isinstance(inner, GroupedFeatureMap):
            raise TypeError(
                f"{type(self).__name__} got {type(inner).__name__}, which takes its place among queries and keys from "
                "them already; use it as it is"
            )
        super().__init__(inner.head_dim, inner.num_features)
        self.exponential = inner.exponential
        self.nonnegative = inner.nonnegative
        self.scale = inner.scale
        self.inner = inner

    @abstractmethod
    def inner_query(self, x: Tensor) -> Tensor:
        """The queries the inner map is given, in at least float32: (..., Lq, D) -> (..., Lq, D)."""

    @abstractmethod
    def inner_key(self, x: Tensor) -> Tensor:
        """The keys the inner map is given, in at least float32: (..., Lk, D) -> (..., Lk, D)."""

    def _fit_inner(self, query: Tensor, key: Tensor) -> None:
        """Fit the inner map, where it takes statistics, on samples (B, Hkv, ·, D) as this map takes them."""
        if isinstance(self.inner, FittedMap):
            self.inner.fit(self.inner_query(query), self.inner_key(key))
