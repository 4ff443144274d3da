"""Softmax attention expanded around query centres, and its protocol: queries read one group of the features.

Letters as in feature_maps/__init__.py, N queries, C centres or groups, F = R/C features of a group.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Self, final

import torch
from torch import Tensor

from linattn.feature_maps._fitted import FittedMap, by_head, grouped_sample, kmeans, means, nearest, token_mean
from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.powers import squared_length
from linattn.softmax.checking import DTYPES, check_count, check_dtype, check_seed, temperature
from linattn.softmax.precision import outside_autocast

# Tokens per head that a fit looks at, evenly spread: enough for means, and its cost stays below that of attention.
_MOST_POINTS = 4096
# Ridge on the keys' covariance, relative to its mean diagonal: only the order of distances depends on it.
_RIDGE = 1e-6
_NUM_ROUNDS = 10
# At order 1, how many standard deviations of the logits a step from the centre may be: measured on the heads of a
# sentence encoder, where 1 to 2 lower the mean error by 8 % and the largest, of heads with long steps, from 2.5 to 1.
_REACH = 1.5


class GroupedFeatureMap(FeatureMap):
    """φ(k) = [exp(ℓ_c(k))·ψ(k)] for c = 1 … C, and φ(q) = one-hot(c(q)) ⊗ χ(q; place_c, z_c).

    Abstract. A query reads the F features of one group alone, which depends on where it lies, and may look at that
    group's sums z of the keys it sees before it reads: its features are those of one query in one state. Hence a state
    costs C·F·Dv multiply-adds per key and F·Dv per query.

    Attributes:
        num_groups: C.
        num_local: F.
    """

    def __init__(self, head_dim: int, num_groups: int, num_local: int) -> None:
        super().__init__(head_dim, num_groups * num_local)
        self.num_groups, self.num_local = num_groups, num_local

    @property
    def positive_normalizer(self) -> bool:
        """True: query features are centred on the z they are divided by."""
        return True

    @property
    def num_exponents(self) -> int:
        """C: one running maximum for each group."""
        return self.num_groups

    @abstractmethod
    def places(self) -> Tensor:
        """Statistics that χ needs of each group, such as its centre: (C, W), (Hkv, C, W) or (B, Hkv, C, W), any W."""

    @abstractmethod
    def group(self, x: Tensor) -> Tensor:
        """The group each query reads: (..., L, D) -> (..., L), integers in [0, C)."""

    @abstractmethod
    def local_query(self, x: Tensor, place: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """χ (..., N, F) of queries and the logarithm (..., N) of a factor left out of it.

        Args:
            x: queries, (..., N, D).
            place: of their groups, (..., N, W) or (..., 1, W).
            z: sums Σ exp(ℓ_c(k))·ψ(k) of the query's group over the keys it sees, (..., N, F) or (..., 1, F), on any
                scale; 0 where it sees none.
        """

    @abstractmethod
    def least_normalizer(self, z: Tensor) -> Tensor:
        """A lower bound of χ·z in exact arithmetic: (..., F) -> (...)."""

    def normalizer(self, chi: Tensor, z: Tensor) -> Tensor:
        """χ·z, (..., F) and (..., F) -> (...); its least value where cancellation has left nothing of it."""
        total, least = (chi * z).sum(-1), self.least_normalizer(z)
        return torch.where(total < least / 2, least, total)

    @abstractmethod
    def key(self, x: Tensor) -> Tensor:
        """ψ, the factor of a key's features that all groups share: (..., L, D) -> (..., L, F)."""

    @abstractmethod
    def key_log_weight(self, x: Tensor) -> Tensor:
        """ℓ, the logarithm of each group's weight of a key: (..., L, D) -> (..., L, C)."""

    def query(self, x: Tensor) -> Tensor:
        """φ(q) before any key was seen, all groups written out: (..., L, D) -> (..., L, R)."""
        group = self.group(x)
        places = self.places().expand(*group.shape[:-1], -1, -1)
        place = torch.take_along_dim(places, group.unsqueeze(-1), dim=-2)
        local, _ = self.local_query(x, place, place.new_zeros(self.num_local))
        chosen = group.unsqueeze(-1) == torch.arange(self.num_groups, device=x.device)
        return (chosen.unsqueeze(-1) * local.unsqueeze(-2)).flatten(-2)


@final
class Expansion(GroupedFeatureMap, FittedMap):
    """The Taylor expansion of softmax attention in the query, around the nearest of C query centres.

    With the scale in δ = scale·(q - c), weights p_j ∝ exp(scale·c·k_j) and their mean key k̄ = Σ p_j k_j,
    exp(scale·q·k_j) = exp(scale·c·k_j)·exp(δ·k̄)·exp(t_j), t_j = δ·(k_j - k̄), and exp(t) is cut after `order`:

        out = Σ_j p_j·w_j v_j / Σ_j p_j·w_j,   w = 1,  1 + t  or  1 + t + t²/2

    The first is the mean of v under the centre's weights (clustered attention), the second adds Cov(v, k)·δ, the third
    the third cumulants. Exact where q = c, and for all q as the order grows. The denominator is Σ p_j > 0 at orders 0
    and 1 and at least that at order 2: weights may be negative at order 1 alone, the normaliser never. As features:
    φ(k) = exp(scale·c·k) ⊗ [1, k, kkᵀ], each product of two stored once, and φ(q) = one-hot(c) ⊗ [1 - u + u²/2,
    (1 - u)·δ, δδᵀ/2] with u = δ·k̄ taken from the sums z of the keys seen. Keys enter less a fixed mean, since these
    moments cancel: order 1 loses |u| times the rounding of the dtype, order 2 u². At order 1 a step δ that moves the
    logits by more than 1.5 standard deviations, |δ|·(the keys' spread per dimension), is shortened to that in w: beyond
    it the line 1 + t is no guide. Centres from the constructor come without a spread and limit no step.

    Centres come from `fit` or the constructor, one set per key/value head, shared by the queries of its group; or,
    where none were given, from each call of attention that is not causal (`call_tensors`): constants for gradients.

    Cost: O(L·C·F·Dv) time for keys and O(L·F·Dv) for queries; F = 1, 1 + D or 1 + D + D(D + 1)/2; R = C·F.

    Args:
        head_dim: D, the width of a query or key.
        num_centres: C.
        order: 0, 1 or 2.
        scale: factor on q·k, > 0; D**-0.5 if None.
        centres: (Hkv, C, D) or (C, D), floating; distances are then Euclidean. None to find them by `fit` or per call.

    Raises:
        ValueError: if a size is not a positive integer, or `order` or the shape of `centres` is none of those above.

    Example:
        >>> import torch
        >>> expansion = Expansion(1, 1, order=1, scale=1.0, centres=torch.tensor([[0.0]]))
        >>> q, k = torch.tensor([[0.5]]), torch.tensor([[2.0]])
        >>> expansion.kernel(q, k).tolist()  # exp(0·2)·(1 + 0.5·2)
        [[2.0]]

    Source: the cumulant expansion of a softmax average; Vyas et al. 2020 (arXiv 2007.04825) for order 0; Yang et al.
        2003 (improved fast Gauss transform) for centres and a Taylor series on one side of a kernel.
    """

    softmax_kernel = True
    fitted_buffers = ("centres", "probes", "key_mean", "spread")
    _fitted_sizes = (("num_centres", "head_dim"), ("num_centres", "head_dim"), (1, "head_dim"), (1, 1))
    _option = "centres"
    _settings = ("head_dim", "num_centres", "order", "scale")
    _least_dtype = torch.float32
    centres: Tensor | None
    probes: Tensor | None
    key_mean: Tensor | None
    spread: Tensor | None
    pairs: Tensor

    def __init__(
        self,
        head_dim: int,
        num_centres: int = 16,
        *,
        order: int = 1,
        scale: float | None = None,
        centres: Tensor | None = None,
    ) -> None:
        check_count("head_dim", head_dim)
        check_count("num_centres", num_centres)
        if type(order) is not int or order not in (0, 1, 2):
            raise ValueError(f"order must be 0, 1 or 2, got {order!r}")
        pairs = head_dim * (head_dim + 1) // 2
        super().__init__(head_dim, num_centres, (1, 1 + head_dim, 1 + head_dim + pairs)[order])
        self.order = order
        self.scale = temperature(scale, head_dim)
        self.nonnegative = order != 1
        self.register_buffer("pairs", torch.triu_indices(head_dim, head_dim, device="cpu"), persistent=False)
        for name in self.fitted_buffers:
            self.register_buffer(name, None)
        if centres is not None:
            check_dtype("centres", centres, DTYPES, "a floating tensor", "convert it, or call fit")
            one = centres.new_zeros(*centres.shape[:-2], 1, head_dim)
            self._set_fitted(centres, centres, one, one[..., :1])

    @property
    def num_centres(self) -> int:
        """C."""
        return self.num_groups

    @property
    def num_heads(self) -> int | None:
        """Hkv, for which centres were fitted; None where they serve all heads or come from the call."""
        return self.centres.shape[-3] if self.centres is not None and self.centres.ndim == 3 else None

    def fit(self, query: Tensor, key: Tensor, *, seed: int = 0) -> Self:
        """Take the centres of clusters of sample queries, one set per key/value head.

        Clusters are those of k-means in the metric of the keys' covariance Σ, |Σ^½(q - c)|, which is the standard
        deviation of the logits' error; centres are their means. At most 4096 tokens per head are looked at.

        Cost: O(Hkv·N·C·D) time for N queries, some twenty times.

        Arguments and errors are those of `FittedMap.fit`, and `seed` of the k-means++ start; one head's serve all.

        Example:
            >>> import torch
            >>> queries = torch.tensor([0.0, 2.0, 7.0, 9.0]).view(1, 1, 4, 1)
            >>> Expansion(1, 2).fit(queries, queries).centres.flatten().sort().values.tolist()
            [1.0, 8.0]

        Source: Lloyd 1982; Arthur and Vassilvitskii 2007 (k-means++).
        """
        grouped = grouped_sample(query, key, self.head_dim)
        with torch.no_grad(), outside_autocast(key.device):
            # The samples of a batch are one sample.
            queries, keys = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (grouped, key))
            fitted = self._find(queries, keys, None, None, check_seed(seed))
            # Those of one head serve any number.
            one = key.shape[1] == 1
            self._set_fitted(*(fitted[name][0, 0] if one else fitted[name][0] for name in self.fitted_buffers))
        return self

    def call_tensors(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None, is_causal: bool
    ) -> Mapping[str, Tensor]:
        """The call's own centres, (B, Hkv, C, D), where none were fitted.

        Arguments are those of `FeatureMap.call_tensors`.

        Returns:
            "centres", "probes", "key_mean" and "spread", in at least float32; nothing for a fitted map.

        Raises:
            ValueError: if nothing was fitted and `is_causal`: centres of all tokens would leak future tokens.
        """
        if self.centres is not None:
            return {}
        grouped, query_mask = self._call_queries(query, key, key_mask, is_causal=is_causal)
        with torch.no_grad():
            return self._find(grouped.detach(), key.detach(), query_mask, key_mask, seed=0)

    def places(self) -> Tensor:
        """The centres and, in one column more, the keys' spread: (C, D + 1), (Hkv, C, D + 1) or (B, Hkv, C, D + 1)."""
        centres, _, _, spread = self._fitted()
        return torch.cat((centres, spread.expand(*centres.shape[:-1], 1)), -1)

    def group(self, x: Tensor) -> Tensor:
        """The nearest centre of each query: (..., L, D) -> (..., L)."""
        x, (centres, probes, _, _) = self._with_fitted(x)
        lengths = (centres * probes).sum(-1).unsqueeze(-2) / 2
        return torch.argmax(torch.matmul(x, probes.mT) - lengths, -1)

    def local_query(self, x: Tensor, place: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """χ (..., N, F) and u (..., N), see the class."""
        delta, count = (x - place[..., :-1]) * self.scale, z[..., :1]
        if self.order == 0:
            # A constant that autograd still knows as a function of the query.
            nothing = delta.sum(-1, keepdim=True) * 0
            return 1 + nothing, nothing.squeeze(-1)
        mean = z[..., 1 : 1 + self.head_dim] / count.masked_fill(count == 0, 1)
        u = (delta * mean).sum(-1, keepdim=True)
        if self.order == 1:
            deviation = squared_length(delta).clamp(min=torch.finfo(delta.dtype).tiny).sqrt() * place[..., -1:]
            share = _REACH / deviation.clamp(min=_REACH)
            return torch.cat((1 - share * u, share * delta), -1), u.squeeze(-1)
        first, second = self.pairs.unbind()
        halves = torch.where(first == second, 0.5, 1.0).to(delta.dtype)
        squares = delta.index_select(-1, first) * delta.index_select(-1, second) * halves
        return torch.cat((1 - u + u.square() / 2, (1 - u) * delta, squares), -1), u.squeeze(-1)

    def least_normalizer(self, z: Tensor) -> Tensor:
        """The count Σ p_j: equal to it at orders 0 and 1, half the logits' variance above it at order 2."""
        return z[..., 0]

    def key(self, x: Tensor) -> Tensor:
        """[1, k, kkᵀ] up to the order, keys less their mean: (..., L, D) -> (..., L, F)."""
        x, (_, _, key_mean, _) = self._with_fitted(x)
        if self.order == 0:
            # A constant that autograd still knows as a function of the key.
            return x[..., :1] * 0 + 1
        ones, centred = x.new_ones(*x.shape[:-1], 1), x - key_mean
        if self.order == 1:
            return torch.cat((ones, centred), -1)
        first, second = self.pairs.unbind()
        return torch.cat((ones, centred, centred.index_select(-1, first) * centred.index_select(-1, second)), -1)

    def key_log_weight(self, x: Tensor) -> Tensor:
        """scale·c·k of every centre, keys less their mean: (..., L, D) -> (..., L, C)."""
        x, (centres, _, key_mean, _) = self._with_fitted(x)
        return torch.matmul(x - key_mean, centres.mT * self.scale)

    def query_log_weight(self, x: Tensor) -> Tensor:
        """scale·q·(mean key), which keys less their mean leave out: (..., L, D) -> (..., L)."""
        x, (_, _, key_mean, _) = self._with_fitted(x)
        return torch.matmul(x, key_mean.mT * self.scale).squeeze(-1)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """exp(scale·q·k̄)·exp(scale·c·k)·(the series of exp(δ·k)), keys less their mean: -> (..., Lq, Lk), float64.

        That is φ(q)·φ(k) before the query features are centred on the keys seen.
        """
        q, k = q.double(), k.double()
        places = self.places().double().expand(*q.shape[:-2], -1, -1)
        place = torch.take_along_dim(places, self.group(q).unsqueeze(-1), dim=-2)
        centre, k = place[..., :-1], k - self._fitted()[2].double()
        t = self.scale * ((q - centre) @ k.mT)
        if self.order == 1:
            deviation = self.scale * (q - centre).norm(dim=-1, keepdim=True) * place[..., -1:]
            t = t * _REACH / deviation.clamp(min=_REACH)
        series = 1 + t * (self.order > 0) + t.square() / 2 * (self.order > 1)
        weight = self.scale * (centre @ k.mT) + self.query_log_weight(q).unsqueeze(-1)
        return torch.exp(weight) * series

    def _find(
        self, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, seed: int
    ) -> dict[str, Tensor]:
        """Centres, Σ·centres and the mean key of queries and keys (B, H, ·, D); masks (B, ·)."""
        queries, weight = _sampled(query, query_mask)
        keys, key_weight = _sampled(key, key_mask)
        key_mean = token_mean(key, key_mask)
        spread = (keys - key_mean) * key_weight.unsqueeze(-1)
        covariance = spread.mT @ spread / key_weight.sum(-1).clamp(min=1)[..., None, None]
        size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
        # Keys that are all alike leave no metric: any will do.
        ridge = torch.where(size > 0, size * _RIDGE, 1)[..., None, None]
        metric = covariance + ridge * torch.eye(self.head_dim, dtype=keys.dtype, device=keys.device)
        points = queries @ torch.linalg.cholesky_ex(metric).L
        cluster = nearest(points, kmeans(points, weight, self.num_centres, seed=seed, num_rounds=_NUM_ROUNDS))
        total = (queries * weight.unsqueeze(-1)).sum(-2, keepdim=True)
        overall = total / weight.sum(-1).clamp(min=1)[..., None, None]
        centres = means(queries, weight, cluster, overall.expand(*overall.shape[:-2], self.num_centres, -1))
        spread = size.sqrt()[..., None, None]
        return {"centres": centres, "probes": centres @ metric, "key_mean": key_mean, "spread": spread}


def _sampled(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Evenly spread tokens (B, H, N, D) in at least float32 and their weights (B, H, N), 0 for masked ones."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.shape[-2] == 0:
        nothing = x.new_zeros(*x.shape[:-2], 1, x.shape[-1], dtype=dtype)
        return nothing, nothing[..., 0]
    if mask is None:
        points = x[..., :: -(-x.shape[-2] // _MOST_POINTS), :].to(dtype)
        return points, points.new_ones(points.shape[:-1])
    live = by_head(mask).expand(x.shape[:-1])
    if x.shape[-2] > _MOST_POINTS:
        # Spread among a head's live tokens, however far its row is padded.
        reach = live.cumsum(-1)
        number = reach[..., -1:]
        place = torch.arange(_MOST_POINTS, device=x.device) * (-(-number // _MOST_POINTS))
        index, live = torch.searchsorted(reach, place + 1).clamp(max=x.shape[-2] - 1), place < number
        x = torch.take_along_dim(x, index.unsqueeze(-1), dim=-2)
    return torch.where(live.unsqueeze(-1), x.to(dtype), 0), live.to(dtype)
