"""Maps that learn from samples, and their statistics; letters as in feature_maps/__init__.py, N points, C centres."""

import random
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, UncastBuffers, has_number
from linattn.softmax.checking import DTYPES, check_dense, check_dtype
from linattn.softmax.tracing import outside_inference


def shared(x: Tensor) -> Tensor:
    """Statistics (Hkv, ·, ·) or (·, ·) as they multiply inputs: one set is shared by any number of heads."""
    return x.squeeze(0) if x.shape[:-2] == (1,) else x


class FittedMap(UncastBuffers, FeatureMap):
    """A map that takes statistics of sample queries and keys with `fit`.

    Abstract: the concrete maps say which. Fitted tensors keep their dtype when a model is cast, live in `state_dict`
    and can be loaded where nothing was fitted; `repr` holds a digest of them.
    """

    fitted_buffers: tuple[str, ...] = ()  # names of those that `fit` sets, None before
    # The last two sizes of each, as numbers or attributes, before which that of key/value heads may stand.
    _fitted_sizes: tuple[tuple[int | str, int | str], ...] = ()
    _option: str  # of the constructor, which gives them without `fit`
    _least_dtype: torch.dtype = torch.float64  # of the copies that are kept

    @abstractmethod
    def fit(self, query: Tensor, key: Tensor) -> Self:
        """Take statistics of sample queries and keys, one set per key/value head, shared by the queries of its group.

        Args:
            query: (B, H, Lq, D), any floating dtype.
            key: (B, Hkv, Lk, D), H a multiple of Hkv.

        Returns:
            The map itself, to be used with Hkv key/value heads from now on.

        Raises:
            ValueError: if the shapes are not these, or a value is not finite.
        """

    def _fitted(self) -> tuple[Tensor, ...]:
        """The fitted tensors, once there are any."""
        self._follow_buffers()
        fitted = tuple(getattr(self, name) for name in self.fitted_buffers)
        if fitted[0] is None:
            is_of_call = type(self).call_tensors is not FeatureMap.call_tensors
            way = ", or use the map through attention that is not causal, which takes these from the call"
            raise ValueError(
                f"{type(self).__name__} has no {self._option}: call fit(query, key) on sample inputs, or give "
                f"{self._option} to the constructor{way if is_of_call else ''}"
            )
        return fitted

    def _call_queries(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, *, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A call's queries by `group_queries`, and which count, (B, Hkv or 1, G·Lq); a causal call would leak."""
        if is_causal:
            raise ValueError(
                f"{type(self).__name__} would take {self._option} from all tokens, later ones included, and leak the "
                f"future into causal attention; call fit(query, key) on sample inputs first, or give {self._option}"
            )
        grouped = group_queries(query, key.shape[1])
        # In self-attention a masked position is padding among the queries too.
        if key_mask is None or query.shape[2] != key.shape[2]:
            return grouped, None
        return grouped, by_head(key_mask).repeat(1, 1, query.shape[1] // key.shape[1])

    def _set_fitted(self, *tensors: Tensor) -> None:
        """Take copies of tensors, in the order of `fitted_buffers`, and derive what depends on them."""
        for name, x in zip(self.fitted_buffers, tensors, strict=True):
            check_dtype(name, x, DTYPES, "a floating tensor", "convert it, or call fit")
        copies = [x.detach().to(torch.promote_types(x.dtype, self._least_dtype), copy=True) for x in tensors]
        self._check_fitted(*copies)
        for name, copy in zip(self.fitted_buffers, copies, strict=True):
            setattr(self, name, copy)
        self._derive_from_buffers()

    def _check_fitted(self, *tensors: Tensor) -> None:
        """Refuse tensors, in the order of `fitted_buffers`, that `fit` would not have set."""
        heads = tensors[0].shape[:-2]
        for name, x, sizes in zip(self.fitted_buffers, tensors, self._fitted_sizes, strict=True):
            size = tuple(getattr(self, number) if isinstance(number, str) else number for number in sizes)
            if x is tensors[0] and (x.dim() not in (2, 3) or x.shape[-2:] != size):
                raise ValueError(f"{name} must be (Hkv, {size[0]}, {size[1]}) or {size}, got {tuple(x.shape)}")
            if x.shape != (*heads, *size):
                raise ValueError(
                    f"{name} must be {(*heads, *size)} beside {self.fitted_buffers[0]}, got {tuple(x.shape)}"
                )
            if has_number(x) and not bool(x.isfinite().all()):
                raise ValueError(f"{name} must be finite, got inf or nan; give other numbers, or call fit")

    def _check_heads(self, x: Tensor) -> None:
        """Refuse inputs with another number of heads than there are statistics, unless those are of one head."""
        held = getattr(self, self.fitted_buffers[0])
        num_heads = held.shape[-3] if held.dim() > 2 else 1
        if num_heads > 1 and (x.dim() < 3 or x.shape[-3] != num_heads):
            raise ValueError(
                f"{type(self).__name__} was fitted for {num_heads} key/value heads, got inputs of shape "
                f"{tuple(x.shape)}, wanted (..., {num_heads}, L, {self.head_dim}); fit it on inputs with as many "
                "key/value heads"
            )

    def extra_repr(self) -> str:
        """Every setting, and a digest of the fitted tensors."""
        settings = super().extra_repr()
        fitted = self.fitted_buffers
        return f"{settings}, {self._option}={self._digest_of(*fitted)}" if fitted else settings

    def _input(self, x: Tensor) -> Tensor:
        """An input in float32 or float64; refused where it does not fit the map, or nothing was fitted."""
        self._check_width(x)
        self._fitted()
        self._check_heads(x)
        return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)

    def _with_fitted(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """An input, and the fitted tensors in its dtype."""
        x = self._input(x)
        return x, tuple(tensor.to(x.dtype) for tensor in self._fitted())

    def _derive_from_buffers(self) -> None:
        """Derive what depends on the fitted tensors; those of inference mode serve training too."""
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else outside_inference(buffer, even_within=True)
        super()._derive_from_buffers()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load fitted tensors even where none, or those of another number of heads, were held before."""
        saved = {name: x for name in self.fitted_buffers if (x := state_dict.get(prefix + name)) is not None}
        if saved:
            self._check_saved(saved, prefix)
        for name, x in saved.items():
            device = next((buffer.device for buffer in self.buffers()), x.device)
            self._buffers[name] = torch.empty_like(x, device=device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._derive_from_buffers()

    def _check_saved(self, saved: dict[str, Tensor], prefix: str) -> None:
        """Refuse tensors of a checkpoint that belong to another map, to none, or were cast."""
        try:
            if missing := [name for name in self.fitted_buffers if name not in saved]:
                raise ValueError(f"{', '.join(missing)} must be saved beside {', '.join(saved)}")
            for name, x in saved.items():
                if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
                    got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                    raise ValueError(f"{name} must be float32 or float64, got {got}")
            self._check_fitted(*saved.values())
        except ValueError as error:
            raise ValueError(
                f"{prefix}{next(iter(saved))} cannot be loaded into {type(self).__name__}: {error}; load what was "
                "saved of a map with the same options, not cast"
            ) from None


def grouped_sample(query: Tensor, key: Tensor, head_dim: int) -> Tensor:
    """Sample queries by `group_queries`; refuse what is not query (B, H, Lq, D) and key (B, Hkv, Lk, D), finite."""
    check_dense(query=query, key=key)
    fits = query.dim() == key.dim() == 4 and query.shape[-1] == key.shape[-1] == head_dim
    fits = fits and query.numel() > 0 and key.numel() > 0
    if not fits or query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"fit wants query (B, H, Lq, {head_dim}) and key (B, Hkv, Lk, {head_dim}), not empty, H a multiple of Hkv; "
            f"got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if not bool(query.isfinite().all() and key.isfinite().all()):
        raise ValueError("fit got values that are not finite; remove padded positions before fitting")
    return group_queries(query, key.shape[1])


def group_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, Lq, D) -> (B, Hkv, G·Lq, D): the queries that read each key/value head, group by group."""
    batch, num_heads, length, dim = query.shape
    return query.reshape(batch, num_kv_heads, num_heads // num_kv_heads * length, dim)


def by_head(mask: Tensor) -> Tensor:
    """A mask of tokens, (B, L) or (B, H or 1, L), for each head: (B, H or 1, L)."""
    return mask if mask.ndim == 3 else mask.unsqueeze(1)


def token_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over tokens, (B, H, L, D) -> (B, H, 1, D), in at least float32, of those that a mask shows; 0 of none."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.sum(dim=-2, keepdim=True) / max(x.shape[-2], 1)
    visible = by_head(mask).unsqueeze(-1)
    # Chosen, not multiplied: 0·inf and 0·nan would spread. Chosen before the sum, so that gradients are 0 there too.
    total = torch.where(visible, x, 0).sum(dim=-2, keepdim=True)
    return total / visible.sum(dim=-2, keepdim=True).clamp(min=1).to(x.dtype)


def second_moment(x: Tensor) -> Tensor:
    """E x xᵀ over batch and tokens, (B, Hkv, L, D) -> (Hkv, D, D), in float64."""
    x = x.double()
    return torch.sum(x.mT @ x, 0) / (x.shape[0] * x.shape[2])


def spectral(matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """U f(λ) Uᵀ of symmetric U diag(λ) Uᵀ, (..., D, D): a function of the matrix, whichever eigenvectors are found."""
    symmetric = (matrix + matrix.mT) / 2
    values, vectors = torch.linalg.eigh(symmetric.nan_to_num())  # It raises at NaN, which `to_empty` may leave.
    product: Tensor = (vectors * function(values).unsqueeze(-2)) @ vectors.mT
    return torch.where(symmetric.isfinite(), (product + product.mT) / 2, torch.nan)


def kmeans(points: Tensor, weight: Tensor, num_centres: int, *, seed: int, num_rounds: int) -> Tensor:
    """Centres (..., C, D) of points (..., N, D) of weights (..., N), by Lloyd's rounds from a k-means++ start."""
    centres = _spread_out(points, weight, num_centres, random.Random(seed))
    for _ in range(num_rounds):
        centres = means(points, weight, nearest(points, centres), centres)
    return centres


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The index (..., N) of the nearest centre of points (..., N, D) among centres (..., C, D)."""
    # |x - c|² without |x|², which all centres share.
    return torch.argmin(centres.square().sum(-1).unsqueeze(-2) / 2 - points @ centres.mT, -1)


def means(points: Tensor, weight: Tensor, cluster: Tensor, otherwise: Tensor) -> Tensor:
    """The mean (..., C, D) of each cluster's points; that of `otherwise` where a cluster has none."""
    numbers = torch.arange(otherwise.shape[-2], device=points.device)
    members = (cluster.unsqueeze(-1) == numbers) * weight.unsqueeze(-1)
    counts = members.sum(-2).unsqueeze(-1)
    return torch.where(counts > 0, members.mT @ points / counts.clamp(min=1), otherwise)


def _spread_out(points: Tensor, weight: Tensor, num_centres: int, draws: random.Random) -> Tensor:
    """k-means++: each next centre is a point drawn with probability proportional to its squared distance so far."""
    centres, distance = [], weight
    for _ in range(num_centres):
        total = distance.cumsum(-1)
        level = total[..., -1:] * draws.random()
        chosen = torch.searchsorted(total, level, right=True).clamp(max=points.shape[-2] - 1)
        centre = torch.take_along_dim(points, chosen.unsqueeze(-1), dim=-2)
        centres.append(centre)
        nearer = (points - centre).square().sum(-1) * weight
        distance = nearer if len(centres) == 1 else torch.minimum(distance, nearer)
    return torch.cat(centres, -2)
