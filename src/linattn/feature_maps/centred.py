"""Centring: q and k moved to their means, the softmax kernel kept; letters as in feature_maps/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self, final

import torch
from torch import Tensor

from linattn.feature_maps._base import FeatureMap
from linattn.feature_maps._statistics import call_queries, check_fit, group_queries, token_mean
from linattn.feature_maps._wrapper import Wrapper


@final
class Centred(Wrapper):
    """Any map for the softmax kernel, applied to centred queries and keys.

    exp(c·q·k) = exp(c·(q - q̄)·(k - k̄)) · exp(c·q̄·k) · exp(c·(q - q̄)·k̄) with c the inner map's scale: the inner map
    estimates the first factor, whose arguments are smaller; the others are weights of one key and of one query, and
    exact. The variance of random features grows with |q + k|², which centring lowers for free.

    The means come from `fit` or the constructor, one per key/value head, shared by the queries of its group; or, where
    nothing was given, from each call of attention that is not causal (`call_tensors`).

    Cost: the inner map's, and O(L·D) time more.

    Args:
        inner: a map with `softmax_kernel`, for example `FavorPlus` or `Taylor`.
        query_mean: q̄, (Hkv, 1, D) or (1, D), floating; any value keeps an exact kernel exact. Given together with
            `key_mean`, or not at all.
        key_mean: k̄, of the same shape.

    Raises:
        TypeError: if `inner` does not stand for the softmax kernel, or is itself centred.
        ValueError: if only one mean is given, or their shapes are not those above.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Taylor
        >>> one = torch.ones(1, 1)
        >>> centred = Centred(Taylor(1, order=1, scale=1.0), query_mean=one, key_mean=one)
        >>> q, k = torch.tensor([[1.0]]), torch.tensor([[2.0]])
        >>> centred.kernel(q, k).log().tolist()  # exact where q = q̄: exp(0·1)·exp(1·2)·exp(0·1)
        [[2.0]]

    Source: shift invariance of softmax, applied to both sides.
    """

    fitted_buffers = ("query_mean", "key_mean")
    _option = "query_mean and key_mean"
    _least_dtype = torch.float32
    query_mean: Tensor | None
    key_mean: Tensor | None

    def __init__(self, inner: FeatureMap, *, query_mean: Tensor | None = None, key_mean: Tensor | None = None) -> None:
        if isinstance(inner, Centred):
            raise TypeError("Centred got a map that is centred already; give it the inner map")
        super().__init__(inner)
        self.register_buffer("query_mean", None)
        self.register_buffer("key_mean", None)
        if query_mean is not None or key_mean is not None:
            if query_mean is None or key_mean is None:
                raise ValueError("Centred wants both query_mean and key_mean, or neither; got one of them")
            self._set_fitted(query_mean, key_mean)

    def fit(self, query: Tensor, key: Tensor) -> Self:
        """Take the means of sample queries and keys, one per key/value head, and fit the map inside on what is left.

        Cost: O(B·(H·Lq + Hkv·Lk)·D) time, and that of the inner map's `fit` where it has one.

        Arguments and errors are those of `FittedMap.fit`.

        Example:
            >>> import torch
            >>> from linattn.feature_maps import Taylor
            >>> keys = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
            >>> Centred(Taylor(1)).fit(keys, 2 * keys).key_mean.tolist()
            [[[4.0]]]
        """
        check_fit(query, key, self.head_dim)
        with torch.no_grad():
            grouped = group_queries(query, key.shape[1])
            self._set_fitted(token_mean(grouped, None).mean(0), token_mean(key, None).mean(0))
            self._fit_inner(grouped, key)
        return self

    def call_tensors(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None, is_causal: bool
    ) -> Mapping[str, Tensor]:
        """The call's own means, (B, Hkv, 1, D), where none were fitted; gradients flow through them.

        Masked keys do not enter, whatever they hold. In self-attention a masked position is padding among the queries
        too: they are left out where Lq = Lk.

        Arguments are those of `FeatureMap.call_tensors`.

        Returns:
            "query_mean" and "key_mean", in at least float32; nothing for a fitted map.

        Raises:
            ValueError: if nothing was fitted and `is_causal`: the mean of all tokens would leak future tokens.
        """
        if self.query_mean is not None:
            return {}
        if is_causal:
            raise ValueError(
                "Centred would take the mean of all tokens, later ones included, and leak the future into causal "
                "attention; call fit(query, key) on sample inputs first, or give query_mean and key_mean"
            )
        grouped, query_mask = call_queries(query, key, key_mask)
        return {"query_mean": token_mean(grouped, query_mask), "key_mean": token_mean(key, key_mask)}

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """The inner map's, and scale·k̄·Σ grad where exponents hold the weight."""
        return self._pulled(x, grad, self.inner.query_vjp, "query")

    def key_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """The inner map's, and scale·q̄·Σ grad where exponents hold the weight."""
        return self._pulled(x, grad, self.inner.key_vjp, "key")

    def extra_repr(self) -> str:
        """A digest of the means."""
        return f"means={self._fitted_digest()}"

    def _pulled(self, x: Tensor, grad: Tensor, pull: Callable[[Tensor, Tensor], Tensor], side: str) -> Tensor:
        """The gradient of an input, through the centred input and through the weight."""
        x, query_mean, key_mean = self._operands(x)
        mean, other = (query_mean, key_mean) if side == "query" else (key_mean, query_mean)
        total = grad.sum(-1, keepdim=True) if self.exponential else None
        gradient = pull(x - mean, grad)
        return gradient if total is None else gradient.addcmul_(total, other, value=self.scale)

    def _moved_query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q - q̄ and scale·(q - q̄)·k̄, (..., L, 1)."""
        x, query_mean, key_mean = self._operands(x)
        centred = x - query_mean
        return centred, torch.matmul(centred, key_mean.mT) * self.scale

    def _moved_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k - k̄ and scale·q̄·k, (..., L, 1)."""
        x, query_mean, key_mean = self._operands(x)
        return x - key_mean, torch.matmul(x, query_mean.mT) * self.scale

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The input in at least float32, and both means in its dtype."""
        self._check_width(x)
        query_mean, key_mean = self._fitted()
        self._check_heads(x)
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32)
        return x, query_mean.to(x.dtype), key_mean.to(x.dtype)

    def _fitted_sizes(self) -> tuple[tuple[int, int], ...]:
        """Of both means."""
        return ((1, self.head_dim),) * 2
