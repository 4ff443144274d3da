"""One block of tokens as features: what the three folds (absorb, read, causal) share.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv value width, E =
Dv + 1, R features, M exponents kept per head (R for exponential maps, 1 for the others), n tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap

# Floats of one feature block: measured best on a CPU with 1 MB of second-level cache per core (a half and a quarter of
# it are 5 and 12 % slower), and what fills a GPU.
_CPU_BLOCK = 2**21
_GPU_BLOCK = 2**24
_LOG2_E = math.log2(math.e)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, exponents and divisions run in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def lowest(dtype: torch.dtype) -> float:
    """The running maximum of no keys: finite, so that differences of maxima are never inf - inf."""
    return torch.finfo(dtype).min / 4


def exponential_(x: Tensor) -> Tensor:
    """exp(x), written over x; by exp2: with the pass for its factor, still half of what torch's exp takes on a CPU."""
    return x.mul_(_LOG2_E).exp2_()


class Moments(NamedTuple):
    """[S, z] = Σ φ(k)[v, 1]ᵀ·exp(-m), and the exponent m it is relative to."""

    sums: Tensor  # (B, H, R, E)
    m: Tensor  # (B, H, M)


def no_moments(
    feature_map: FeatureMap, batch: int, heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> Moments:
    """The moments of no keys; an exponential map keeps one running maximum per feature, any other one per head."""
    sums = torch.zeros(batch, heads, feature_map.num_features, value_dim + 1, dtype=dtype, device=device)
    num_exponents = feature_map.num_features if feature_map.exponential else 1
    return Moments(sums, torch.full((batch, heads, num_exponents), lowest(dtype), dtype=dtype, device=device))


def block_size(rows: int, num_features: int, device: torch.device, *, is_causal: bool) -> int:
    """Tokens per block for `rows` = B·H·G rows of features; causal blocks also pay for n × n products."""
    budget = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
    size = max(budget // max(rows * num_features, 1), 64)
    return min(size, 128) if is_causal else min(size, 1024)


def blocks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """The bounds of consecutive blocks of `size` tokens; the last may be shorter."""
    for start in range(0, length, size):
        yield start, min(start + size, length)


class Keys(NamedTuple):
    """A block of keys: φ(k) = linear · exp(log), where None stands for 1."""

    log: Tensor | None  # (B, H, n, M), -inf where masked
    linear: Tensor | None  # (B, H, n, R)

    def peak(self, m: Tensor) -> Tensor:
        """The running maximum (B, H, M) after these keys."""
        return m.clamp(min=0) if self.log is None else torch.maximum(m, self.log.amax(-2))

    def relative_to(self, c: Tensor, out: Tensor | None = None) -> Tensor:
        """φ(k)·exp(-c), (B, H, n, R): at most 1 for exponential maps when c is at or above these keys' maximum.

        An exponential map's features are written into `out` where it is given.
        """
        if self.log is None:
            assert self.linear is not None
            return self.linear
        weight = exponential_(torch.sub(self.log, c.unsqueeze(-2), out=out if self.linear is None else None))
        return weight if self.linear is None else self.linear * weight

    def turned_relative_to(self, c: Tensor) -> Tensor:
        """The same, written over the exponents of an exponential map: for the pass that needs them no more."""
        if self.linear is not None or self.log is None:
            return self.relative_to(c)
        return exponential_(self.log.sub_(c.unsqueeze(-2)))

    def own_peak(self) -> Tensor:
        """These keys' own maximum (…, M), finite even where all are masked."""
        assert self.log is not None
        return self.log.amax(-2).clamp(min=lowest(self.log.dtype))


class Workspace:
    """Buffers that the blocks of one fold write over again: fresh memory costs more than arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor of this shape, in the memory of the first block's."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)

    def rows(self, name: str, x: Tensor, mask: Tensor | None) -> Tensor:
        """A block of tokens in the accumulation dtype, masked (B, n) ones set to 0; not copied where it need not be."""
        if mask is None and x.dtype == self._like.dtype:
            return x
        rows = self.buffer(name, *x.shape).copy_(x)
        return rows if mask is None else rows.masked_fill_(~mask[:, None, :, None], 0)


def key_block(feature_map: FeatureMap, x: Tensor, mask: Tensor | None, space: Workspace) -> Keys:
    """The features of keys x (B, H, n, D), to be written over; `mask` is (B, n)."""
    first = feature_map.write_key(x, space.buffer("keys", *x.shape[:-1], feature_map.num_features))
    weight = None if feature_map.exponential else feature_map.key_log_weight(x)
    return as_keys((first,) if weight is None else (first, weight), feature_map, mask)


def query_block(feature_map: FeatureMap, x: Tensor, space: Workspace) -> Tensor:
    """What the map says of queries x (B, H, n, D), to be written over."""
    return feature_map.write_query(x, space.buffer("queries", *x.shape[:-1], feature_map.num_features))


def key_outputs(feature_map: FeatureMap, x: Tensor) -> tuple[Tensor, ...]:
    """What the map says of keys: (exponents,), (features,) or (features, log-weights)."""
    if feature_map.exponential:
        return (feature_map.key(x),)
    weight = feature_map.key_log_weight(x)
    return (feature_map.key(x),) if weight is None else (feature_map.key(x), weight)


def as_keys(outputs: Sequence[Tensor], feature_map: FeatureMap, mask: Tensor | None) -> Keys:
    """`key_outputs` as Keys, masked keys at exponent -inf."""
    log: Tensor | None
    linear: Tensor | None
    if feature_map.exponential:
        log, linear = outputs[0], None
    else:
        linear = outputs[0]
        log = outputs[1].unsqueeze(-1) if len(outputs) > 1 else None
    if mask is not None:
        log = torch.where(mask[:, None, :, None], outputs[0].new_zeros(()) if log is None else log, -torch.inf)
    return Keys(log, linear)


def query_features(t: Tensor, c: Tensor, exponential: bool, *, over: bool = False) -> tuple[Tensor, Tensor]:
    """Features of queries relative to c, and their own exponent (B, H, n); `over` writes over t."""
    if not exponential:
        return t, c.expand(t.shape[:-1])
    shifted = t.add_(c.unsqueeze(-2)) if over else t + c.unsqueeze(-2)
    reference = shifted.amax(-1, keepdim=True)
    return exponential_(shifted.sub_(reference)), reference.squeeze(-1)


def parted(moments: Tensor) -> tuple[Tensor, Tensor]:
    """S (B·H, R, Dv) and z (B·H, R, 1) of moments (B, H, R, E), for products whose widths stay round numbers."""
    flat = moments.flatten(0, 1)
    return flat[..., :-1].contiguous(), flat[..., -1:].contiguous()


def joined(S: Tensor, z: Tensor, like: Tensor) -> Tensor:
    """The moments again, in the shape of `like`."""
    return torch.cat((S, z), -1).view(like.shape)


def normalised_query_features(
    t: Tensor, c: Tensor, reference: Tensor, exponential: bool, out: Tensor | None = None
) -> Tensor:
    """The same features relative to a row reference (B, H, n) that is already known, into `out` where it is given."""
    if not exponential:
        return t * (c.unsqueeze(-2) - reference.unsqueeze(-1)).exp_()
    shifted = torch.add(t, c.unsqueeze(-2), out=out)
    return exponential_(shifted.sub_(reference.unsqueeze(-1)))


def masked_rows(x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Tokens in the accumulation dtype; masked ones replaced by 0, so that whatever they hold is inert."""
    if mask is not None:
        x = torch.where(mask[:, None, :, None], x, 0)
    return x.to(dtype)


def with_ones(value: Tensor) -> Tensor:
    """[v, 1]: the extra column makes one product carry numerator and denominator."""
    extended = value.new_ones(*value.shape[:-1], value.shape[-1] + 1)
    extended[..., :-1] = value
    return extended


def traced(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a map on a block with a graph of its own; returns the leaf and the outputs."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return leaf, function(leaf)


def pulled_back(
    leaf: Tensor, outputs: Sequence[Tensor], grads: Sequence[Tensor], tensors: Sequence[Tensor], totals: list[Tensor]
) -> Tensor:
    """Gradient with respect to the block; the map's own tensors' gradients are added to `totals`."""
    found = torch.autograd.grad(outputs, (leaf, *tensors), grads, allow_unused=True, materialize_grads=True)
    for total, grad in zip(totals, found[1:], strict=True):
        total += grad
    return found[0]


def new_totals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros to sum the gradients of the map's own tensors in."""
    return [torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in tensors]
