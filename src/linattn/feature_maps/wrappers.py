"""Any map for the softmax kernel with q and k moved: balanced, centred; letters as in feature_maps/__init__.py."""

from collections.abc import Callable, Mapping
from typing import Self, final

import torch
from torch import Tensor

from linattn.feature_maps._fitted import grouped_sample, second_moment, shared, spectral, token_mean
from linattn.feature_maps._wrapper import Wrapper
from linattn.feature_maps.base import FeatureMap, has_number, in_both_dtypes
from linattn.softmax.checking import check_number

# Beyond this condition number the inverse of M in float64 no longer keeps q·k to the digits float32 has.
_LARGEST_CONDITION = 1e8


@final
class Balanced(Wrapper):
    """Any map for the softmax kernel, applied to balanced queries and keys.

    q -> M q and k -> M⁻ᵀ k keep q·k, hence the kernel, for every invertible M. `fit` takes M = (Σq⁻¹ # Σk)^½, with
    Σq = E q qᵀ, Σk = E k kᵀ and # the geometric mean of matrices: then M Σq Mᵀ = M⁻ᵀ Σk M⁻¹, and
    E|Mq|² + E|M⁻ᵀk|² = 2·tr (Σq^½ Σk Σq^½)^½ is the smallest any M gives. The variance of random features grows with
    |q + k|², whose mean falls with it. `Centred(Balanced(…))` balances what is left once the means are gone.

    Before, eigenvalues of Σq and Σk below `ridge` times the largest are raised to that. It
    bounds the condition number of M by ridge^-½, and with it rounding: q·k loses at most that factor. q·k is kept
    whatever `ridge` is; only E|Mq|² + E|M⁻ᵀk|² is then the smallest up to ridge·D times its value before. Queries or
    keys that are all 0 leave M = I.

    M is a constant for gradients.

    Cost: the inner map's, and O(L·D²) time more; `fit` O(D³) for each head.

    Args:
        inner: a map with `softmax_kernel` that is neither `Balanced` nor `Centred`, for example `FavorPlus`.
        ridge: smallest eigenvalue of a second moment relative to its largest, 0 < ridge ≤ 1.
        transform: M, (Hkv, D, D) or (D, D), floating and invertible; None to measure it with `fit`.

    Raises:
        TypeError: if `inner` does not stand for the softmax kernel, or is balanced or centred itself.
        ValueError: if `ridge` is not in that range, or `transform` has another shape or is not invertible. Using the
            map before the transform is known raises too.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Taylor
        >>> balanced = Balanced(Taylor(1, scale=1.0))
        >>> q, k = torch.full((1, 1, 2, 1), 8.0), torch.full((1, 1, 2, 1), 2.0)
        >>> balanced.fit(q, k).transform.tolist()  # (2²/8²)^¼
        [[[0.5]]]
        >>> balanced.inner_query(q)[0, 0, 0].item(), balanced.inner_key(k)[0, 0, 0].item()  # 8·2 = 4·4
        (4.0, 4.0)

    Source: Likhosherstov et al. 2023 (arXiv 2302.00787), ADERF; the name is Moore's (1981), of balanced realisations.
    """

    fitted_buffers = _decomposed = ("transform",)
    _fitted_sizes = (("head_dim", "head_dim"),)
    _option = "transform"
    _settings = ("ridge",)
    transform: Tensor | None

    def __init__(self, inner: FeatureMap, *, ridge: float = 1e-6, transform: Tensor | None = None) -> None:
        if isinstance(inner, Wrapper):
            raise TypeError(
                f"Balanced wants a map without a wrapper, got {type(inner).__name__}; give it the inner map, and "
                "centre outside, as in Centred(Balanced(inner))"
            )
        super().__init__(inner)
        self.ridge = check_number("ridge", ridge, positive=True)
        if self.ridge > 1:
            raise ValueError(f"ridge is relative to the largest eigenvalue, at most 1, got {ridge!r}")
        self.register_buffer("transform", None)
        self._prepared: dict[torch.dtype, tuple[Tensor, ...]] = {}
        if transform is not None:
            self._set_fitted(transform)

    def fit(self, query: Tensor, key: Tensor) -> Self:
        """Take M from second moments of sample queries and keys, one per key/value head, and fit the map inside.

        Cost: O(B·(H·Lq + Hkv·Lk)·D² + Hkv·D³) time, and that of the inner map's `fit` where it has one.

        Arguments and errors are those of `FittedMap.fit`.
        """
        grouped = grouped_sample(query, key, self.head_dim)
        with torch.no_grad():
            self._set_fitted(_balancing(second_moment(grouped), second_moment(key), self.ridge))
            self._fit_inner(grouped, key)
        return self

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """Mᵀ applied to the inner map's."""
        x, forward, _ = self._operands(x)
        return torch.matmul(self.inner.query_vjp(torch.matmul(x, forward), grad), forward.mT)

    def key_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """M⁻¹ applied to the inner map's."""
        x, _, backward = self._operands(x)
        return torch.matmul(self.inner.key_vjp(torch.matmul(x, backward), grad), backward.mT)

    def _moved_query(self, x: Tensor) -> tuple[Tensor, None]:
        """M q."""
        x, forward, _ = self._operands(x)
        return torch.matmul(x, forward), None

    def _moved_key(self, x: Tensor) -> tuple[Tensor, None]:
        """M⁻ᵀ k."""
        x, _, backward = self._operands(x)
        return torch.matmul(x, backward), None

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The input in at least float32; what multiplies queries and what multiplies keys from the right, as it."""
        x = self._input(x)
        forward, backward = self._prepared[x.dtype]
        return x, forward, backward

    def _check_fitted(self, *tensors: Tensor) -> None:
        """Refuse transforms of another shape, and such that have no inverse."""
        super()._check_fitted(*tensors)
        (transform,) = tensors
        if not has_number(transform):
            return
        if not bool((torch.linalg.cond(transform.double()) <= _LARGEST_CONDITION).all()):
            raise ValueError(
                f"transform must be invertible, its condition number at most {_LARGEST_CONDITION:g}; raise "
                "ridge, or give another"
            )

    def _derive_from_buffers(self) -> None:
        """M and its exact inverse, for the dtypes they are used with, as they multiply from the right."""
        super()._derive_from_buffers()
        if self.transform is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            matrix = shared(self.transform)
            # There may be none until values are loaded.
            inverse, wrong = torch.linalg.inv_ex(matrix)
            inverse.masked_fill_(wrong[..., None, None] > 0, torch.nan)
            self._prepared = in_both_dtypes(matrix.mT.contiguous(), inverse)


def _balancing(query: Tensor, key: Tensor, ridge: float) -> Tensor:
    """(Σq⁻¹ # Σk)^½, (Hkv, D, D), of second moments with eigenvalues below `ridge` times the largest raised to that."""
    # One that is 0 is replaced by the other, two by I, so that nothing is moved.
    size = [moment.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] for moment in (query, key)]
    identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
    either = torch.where(size[0] > 0, query, torch.where(size[1] > 0, key, identity))
    moments = either, torch.where(size[1] > 0, key, either)
    query, key = (spectral(y, lambda x: torch.maximum(x, ridge * x.amax(-1, keepdim=True))) for y in moments)
    # A # B = A^½ (A^-½ B A^-½)^½ A^½.
    inverse = spectral(query, torch.reciprocal)
    root, unroot = spectral(inverse, torch.sqrt), spectral(inverse, torch.rsqrt)
    between = spectral(unroot @ key @ unroot, lambda x: x.clamp(min=0).sqrt())
    return spectral(root @ between @ root, torch.sqrt)


@final
class Centred(Wrapper):
    """Any map for the softmax kernel, applied to centred queries and keys.

    exp(c·q·k) = exp(c·(q - q̄)·(k - k̄)) · exp(c·q̄·k) · exp(c·(q - q̄)·k̄) with c the inner map's scale: the inner map
    estimates the first factor, whose arguments are smaller; the others are weights of one key and of one query, and
    exact. The variance of random features grows with |q + k|², which centring lowers for free.

    The means come from `fit` or the constructor, one per key/value head, shared by the queries of its group; or, where
    nothing was given, from each call of attention that is not causal (`call_tensors`).

    Cost: the inner map's, and O(L·D) time more; where gradients follow means of the call, q and k are kept in float32.

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
    _fitted_sizes = ((1, "head_dim"), (1, "head_dim"))
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
        grouped = grouped_sample(query, key, self.head_dim)
        with torch.no_grad():
            self._set_fitted(token_mean(grouped, None).mean(0), token_mean(key, None).mean(0))
            self._fit_inner(grouped, key)
        return self

    def call_tensors(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None, is_causal: bool
    ) -> Mapping[str, Tensor]:
        """The call's own means, (B, Hkv, 1, D), where none were fitted; gradients flow through them.

        Arguments are those of `FeatureMap.call_tensors`.

        Returns:
            "query_mean" and "key_mean", in at least float32; nothing for a fitted map.

        Raises:
            ValueError: if nothing was fitted and `is_causal`: the mean of all tokens would leak future tokens.
        """
        if self.query_mean is not None:
            return {}
        grouped, query_mask = self._call_queries(query, key, key_mask, is_causal=is_causal)
        return {"query_mean": token_mean(grouped, query_mask), "key_mean": token_mean(key, key_mask)}

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """The inner map's, and scale·k̄·Σ grad where exponents hold the weight."""
        return self._pulled(x, grad, self.inner.query_vjp, "query")

    def key_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """The inner map's, and scale·q̄·Σ grad where exponents hold the weight."""
        return self._pulled(x, grad, self.inner.key_vjp, "key")

    def extra_repr(self) -> str:
        """A digest of the means."""
        return f"means={self._digest_of(*self.fitted_buffers)}"

    def _pulled(self, x: Tensor, grad: Tensor, pull: Callable[[Tensor, Tensor], Tensor], side: str) -> Tensor:
        """The gradient of an input, through the centred input and through the weight."""
        x, (query_mean, key_mean) = self._with_fitted(x)
        mean, other = (query_mean, key_mean) if side == "query" else (key_mean, query_mean)
        total = grad.sum(-1, keepdim=True) if self.exponential else None
        gradient = pull(x - mean, grad)
        return gradient if total is None else gradient.addcmul_(total, other, value=self.scale)

    def _moved_query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q - q̄ and scale·(q - q̄)·k̄, (..., L, 1)."""
        x, (query_mean, key_mean) = self._with_fitted(x)
        centred = x - query_mean
        return centred, torch.matmul(centred, key_mean.mT) * self.scale

    def _moved_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k - k̄ and scale·q̄·k, (..., L, 1)."""
        x, (query_mean, key_mean) = self._with_fitted(x)
        return x - key_mean, torch.matmul(x, query_mean.mT) * self.scale
