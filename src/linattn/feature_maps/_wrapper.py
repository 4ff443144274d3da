"""Maps around a map for the softmax kernel; letters as in feature_maps/__init__.py."""

from abc import abstractmethod

import torch
from torch import Tensor

from linattn.feature_maps._fitted import FittedMap
from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.expansion import GroupedFeatureMap
from linattn.softmax.precision import LOG2_E, outside_autocast


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

    def __init__(self, inner: FeatureMap) -> None:
        if not isinstance(inner, FeatureMap) or not inner.softmax_kernel:
            raise TypeError(
                f"{type(self).__name__} wants a map for the softmax kernel, got {inner!r}: for other kernels moving q "
                "and k changes the kernel; use FavorPlus, Hyperbolic, Oprf, Sderf, Trigonometric, Taylor or "
                "LearnedExponential"
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
        self.num_heads = getattr(inner, "num_heads", None)
        self.inner = inner

    @abstractmethod
    def _moved_query(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Moved queries (..., L, D), in at least float32, and the logarithm of their weight (..., L, 1); None for 0."""

    @abstractmethod
    def _moved_key(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Moved keys (..., L, D), in at least float32, and the logarithm of their weight (..., L, 1); None for 0."""

    def inner_query(self, x: Tensor) -> Tensor:
        """The queries the inner map is given, in at least float32: (..., Lq, D) -> (..., Lq, D)."""
        return self._moved_query(x)[0]

    def inner_key(self, x: Tensor) -> Tensor:
        """The keys the inner map is given, in at least float32: (..., Lk, D) -> (..., Lk, D)."""
        return self._moved_key(x)[0]

    def query(self, x: Tensor) -> Tensor:
        """Features, or their exponents, of queries: (..., L, D) -> (..., L, R)."""
        moved, log_weight = self._moved_query(x)
        phi = self.inner.query(moved)
        return phi if log_weight is None or not self.exponential else phi + log_weight

    def key(self, x: Tensor) -> Tensor:
        """Features, or their exponents, of keys: (..., L, D) -> (..., L, R)."""
        moved, log_weight = self._moved_key(x)
        phi = self.inner.key(moved)
        return phi if log_weight is None or not self.exponential else phi + log_weight

    def write_query_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """The inner map's, with the weight among the rows."""
        moved, log_weight = self._moved_query(x)
        return self.inner.write_query_powers(moved, out, _joint(rows, log_weight), columns)

    def write_key_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """The inner map's, with the weight among the rows."""
        moved, log_weight = self._moved_key(x)
        return self.inner.write_key_powers(moved, out, _joint(rows, log_weight), columns)

    def query_log_weight(self, x: Tensor) -> Tensor | None:
        """The queries' weight and the inner map's own, (..., L); None where `exponential`, whose exponents hold it."""
        if self.exponential:
            return None
        moved, log_weight = self._moved_query(x)
        return _sum(log_weight, self.inner.query_log_weight(moved))

    def key_log_weight(self, x: Tensor) -> Tensor | None:
        """The keys' weight and the inner map's own, (..., L); None where `exponential`, whose exponents hold it."""
        if self.exponential:
            return None
        moved, log_weight = self._moved_key(x)
        return _sum(log_weight, self.inner.key_log_weight(moved))

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """The inner kernel of moved inputs times both weights, in float64: -> (..., Lq, Lk)."""
        (moved_q, query_weight), (moved_k, key_weight) = self._moved_query(q.double()), self._moved_key(k.double())
        kernel = self.inner.kernel(moved_q, moved_k)
        if query_weight is None or key_weight is None:
            return kernel
        return kernel * torch.exp(query_weight + key_weight.mT)

    def _fit_inner(self, query: Tensor, key: Tensor) -> None:
        """Fit the inner map, where it takes statistics, on samples (B, Hkv, ·, D) as this map takes them."""
        if isinstance(self.inner, FittedMap):
            with outside_autocast(key.device):
                self.inner.fit(self.inner_query(query), self.inner_key(key))


def _joint(rows: Tensor | None, log_weight: Tensor | None) -> Tensor | None:
    """Rows of base 2 and the logarithm of a weight, (..., L, 1) each, as one of base 2; None for 0."""
    if log_weight is None:
        return rows
    return log_weight * LOG2_E if rows is None else torch.add(rows, log_weight, alpha=LOG2_E)


def _sum(log_weight: Tensor | None, inner_weight: Tensor | None) -> Tensor | None:
    """Two logarithms of weights, (..., L, 1) and (..., L), as one (..., L); None for 0."""
    if log_weight is None:
        return inner_weight
    return log_weight.squeeze(-1) if inner_weight is None else log_weight.squeeze(-1) + inner_weight
