"""Nyström features: the softmax kernel through landmarks; letters as in feature_maps/__init__.py, R landmarks."""

from __future__ import annotations

import math
from typing import Any, Self, final

import torch
from torch import Tensor

from linattn.feature_maps._arguments import check_count, check_number, check_seed, temperature
from linattn.feature_maps._base import in_both_dtypes
from linattn.feature_maps._fitted import FittedMap, shared
from linattn.feature_maps._statistics import check_fit, kmeans, spectral


@final
class Nystrom(FittedMap):
    """The Nyström approximation of the softmax kernel on landmarks among the keys.

    With x̃ = √scale·x, landmarks z_1..z_R and the Gaussian kernel g(x, y) = exp(-|x̃ - ỹ|²/2), exp(scale·q·k) is
    exp(|q̃|²/2)·g(q, k)·exp(|k̃|²/2), and g(q, k) is replaced by

        g(q, Z)·(K + ridge·I)⁻¹·g(Z, k),   K = g(Z, Z),

    which is φ(q)·φ(k) with φ(x) = (K + ridge·I)^-½·g(Z, x)·exp(|x̃|²/2). Deterministic for given landmarks, and of
    either sign. `query` and `key` return (K + ridge·I)^-½·softmax_r(z̃_r·x̃ - |z̃_r|²/2), which no distance makes
    underflow; what is missing, the logarithm of that softmax's normaliser, is `query_log_weight` and `key_log_weight`.

    Alone it is unstable: a query far from all landmarks gets weights of both signs that may sum to 0. The guard is
    `ridge`, to be compared with K's diagonal of 1: it bounds |φ(x)|² by exp(|x̃|²)·|g(Z, x)|²/ridge and moves the
    weights towards the nonnegative g(q, Z)·g(Z, k). With ridge=0 the kernel is exact wherever q or k is a landmark;
    eigenvalues of K below R·2⁻⁵² times the largest, such as those of coinciding landmarks, are left out. On heads of a
    sentence encoder it was not small eigenvalues that spoiled the answer but far queries: dropping eigenvalues helped
    nowhere, a ridge near 1 did, and centring and balancing first, as in Centred(Balanced(Nystrom(…))), did most.

    Cost: O(L·R·(D + R)) time, O(L·R) memory; `fit` O(Hkv·(B·Lk·R·D·steps + R³)).

    Args:
        head_dim: D, the width of a query or key.
        num_features: R, the number of landmarks.
        scale: factor on q·k, > 0; D**-0.5 if None.
        seed: of the choice of landmarks, 0 ≤ seed < 2**63.
        num_steps: Lloyd's steps after the k-means++ seeding; 0 leaves a subset of the keys.
        ridge: ≥ 0, added to K's eigenvalues.
        landmarks: Z, (Hkv, R, D) or (R, D), floating, in the keys' own units; None to choose them with `fit`.

    Raises:
        ValueError: if a size is not a positive integer, an option is not one of those above, or `landmarks` has another
            shape or is not finite. Using the map before its landmarks are known raises too.

    Example:
        >>> key = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        >>> nystrom = Nystrom(2, 2, scale=1.0, ridge=0.0, landmarks=key)
        >>> nystrom.kernel(torch.tensor([[3.0, -1.0]]), key).log().round(decimals=4).tolist()  # q·k, exactly
        [[-1.0, 6.0]]

    Source: Williams and Seeger 2001; landmarks by k-means++, Arthur and Vassilvitskii 2007.
    """

    fitted_buffers = ("landmarks",)
    _fitted_sizes = (("num_features", "head_dim"),)
    _option = "landmarks"
    _settings = ("head_dim", "num_features", "scale", "_seed", "num_steps", "ridge")
    nonnegative = False
    softmax_kernel = True
    landmarks: Tensor | None
    seed: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        scale: float | None = None,
        seed: int = 0,
        num_steps: int = 5,
        ridge: float = 1.0,
        landmarks: Tensor | None = None,
    ) -> None:
        super().__init__(head_dim, num_features)
        self.scale = temperature(scale, head_dim)
        self.num_steps = check_count("num_steps", num_steps, at_least=0)
        self.ridge = check_number("ridge", ridge)
        self._seed = check_seed(seed)
        self.register_buffer("seed", torch.tensor(self._seed, dtype=torch.int64, device="cpu"))
        self.register_buffer("landmarks", None)
        self._prepared: dict[torch.dtype, tuple[Tensor, ...]] = {}
        if landmarks is not None:
            self._set_fitted(landmarks)

    def fit(self, query: Tensor, key: Tensor) -> Self:
        """Choose landmarks for each key/value head: k-means++ on sample keys, then Lloyd's steps; queries do not enter.

        Cost: O(Hkv·(B·Lk·R·D·(1 + num_steps) + R³)) time, O(Hkv·B·Lk·R) memory.

        Arguments and errors are those of `FittedMap.fit`. With fewer distinct keys than R some landmarks coincide,
        which changes nothing but the cost.

        Example:
            >>> key = torch.tensor([1.0, 1.0, 4.0]).view(1, 1, 3, 1)
            >>> sorted(Nystrom(1, 2).fit(key, key).landmarks.flatten().tolist())
            [1.0, 4.0]
        """
        check_fit(query, key, self.head_dim)
        with torch.no_grad():
            points = key.transpose(0, 1).flatten(1, 2).double()
            weight = torch.ones_like(points[..., 0])
            self._set_fitted(kmeans(points, weight, self.num_features, seed=self._seed, num_rounds=self.num_steps))
        return self

    def query(self, x: Tensor) -> Tensor:
        """Features (K + ridge·I)^-½·softmax(z̃·x̃ - |z̃|²/2): (..., L, D) -> (..., L, R)."""
        logits, whitening = self._logits(x)
        return torch.matmul(logits.softmax(-1), whitening)

    def query_log_weight(self, x: Tensor) -> Tensor:
        """log Σ_r exp(z̃_r·x̃ - |z̃_r|²/2): (..., L, D) -> (..., L)."""
        return self._logits(x)[0].logsumexp(-1)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """exp((|q̃|² + |k̃|²)/2)·g(q, Z)·(K + ridge·I)⁻¹·g(Z, k), in float64: -> (..., Lq, Lk)."""
        (to_query, whitening), (to_key, _) = self._logits(q.double()), self._logits(k.double())
        return to_query.exp() @ whitening @ whitening @ to_key.exp().mT

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z̃·x̃ - |z̃|²/2, (..., L, R), in at least float32, and (K + ridge·I)^-½ in its dtype."""
        x = self._input(x)
        weights, constants, whitening = self._prepared[x.dtype]
        return torch.matmul(x, weights) - constants, whitening

    def _check_fitted(self, *tensors: Tensor) -> None:
        """Refuse landmarks of another shape, and such that are not finite."""
        super()._check_fitted(*tensors)
        (landmarks,) = tensors
        if not landmarks.is_meta and not bool(landmarks.isfinite().all()):
            raise ValueError("landmarks must be finite; leave padded positions out")

    def _refresh(self) -> None:
        """√scale·z̃ as it multiplies inputs, |z̃|²/2 and (K + ridge·I)^-½, for the dtypes they are used with."""
        super()._refresh()
        self._prepared = {}
        if self.landmarks is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            z = shared(self.landmarks).double()
            scaled = math.sqrt(self.scale) * z
            # By differences: a product would not give coinciding landmarks the distance 0.
            distance = torch.cdist(scaled, scaled, compute_mode="donot_use_mm_for_euclid_dist")
            self._prepared = in_both_dtypes(
                (self.scale * z).mT.contiguous(),
                scaled.square().sum(-1).unsqueeze(-2) / 2,
                spectral(torch.exp(distance.square() / -2), self._inverse_root),
            )

    def _inverse_root(self, eigenvalues: Tensor) -> Tensor:
        """(λ + ridge)^-½, 0 where that is rounding."""
        raised = eigenvalues.clamp(min=0) + self.ridge
        is_resolved = raised > self.num_features * torch.finfo(raised.dtype).eps * raised.amax(-1, keepdim=True)
        return torch.where(is_resolved, raised, math.inf).rsqrt()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, and take the seed over."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        seed = state_dict.get(f"{prefix}seed")
        if seed is not None:
            self._seed = int(seed)
