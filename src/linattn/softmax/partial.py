"""Partial results over some of the keys combine exactly; letters as in softmax/__init__.py."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

S = TypeVar("S")


class Partial(NamedTuple):
    """Attention over some of the keys: the normalised output and the logarithm of its normaliser.

    out_i = Σ_j w_ij v_j / Σ_j w_ij and log_normalizer_i = log Σ_j w_ij, FlashAttention's LSE.

    Attributes:
        out: (B, H, Lq, Dv), in the inputs' dtype; 0 where no key was seen.
        log_normalizer: (B, H, Lq), float32 or float64, in nats; -inf where no key was seen, NaN where a signed map's
            normaliser is negative.
    """

    out: Tensor
    log_normalizer: Tensor

    def ungrouped(self, dtype: torch.dtype | None = None) -> Partial:
        """The rows with query heads in one dimension, (B, Hkv, G, …) -> (B, H, …), outputs in their dtype or this."""
        return Partial(self.out.flatten(1, 2).to(dtype or self.out.dtype), self.log_normalizer.flatten(1, 2))

    def times(self, apart: Tensor | None) -> Partial:
        """Rows (B, Hkv, G, Lq, ·) over keys whose weights have a factor more, its logarithm (B, Hkv); None for 1."""
        if apart is None:
            return self
        log = self.log_normalizer
        return self._replace(log_normalizer=(log + apart[..., None, None]).to(log.dtype))

    def with_sink(self, sink: Tensor) -> Tensor:
        """The outputs beside one more key of value 0 in each head, an attention sink.

            out_i · Z_i / (Z_i + exp(s)) = out_i · sigmoid(log Z_i - s)

        Time O(Lq·Dv) per head. Rows that saw no key stay 0.

        Args:
            sink: (H,), floating: s, the sink's logit in each head, on the log-normalisers' scale; -inf for none.

        Returns:
            (B, H, Lq, Dv) in the dtype of `out`.

        Raises:
            ValueError: `sink` is no floating tensor of this shape.

        Example:
            >>> import torch
            >>> part = Partial(torch.tensor([[[[4.0]]]]), torch.log(torch.tensor([[[3.0]]])))
            >>> round(part.with_sink(torch.tensor([0.0])).item(), 4)  # weights 3 : 1
            3.0

        Source: OpenAI 2025 (gpt-oss model card, arXiv 2508.10925), section 2.
        """
        heads = self.out.shape[1:2]
        if not isinstance(sink, Tensor) or sink.shape != heads or not sink.is_floating_point():
            got = f"{sink.dtype} of shape {tuple(sink.shape)}" if isinstance(sink, Tensor) else sink
            raise ValueError(
                f"sink must be a floating tensor (H,) = {tuple(heads)}, got {got}; give one logit for each head"
            )
        # A finite logit, as small: of rows that saw no key the difference of two infinities would be no number.
        log = self.log_normalizer
        least = sink.to(log.dtype).clamp(min=torch.finfo(log.dtype).min)
        share = torch.sigmoid(log - least.unsqueeze(-1)).unsqueeze(-1)
        return (self.out * share).to(self.out.dtype)


class Attended(NamedTuple, Generic[S]):
    """Result of a call that goes on from a state.

    Attributes:
        out: of the queries, (B, H, Lq, Dv) in their dtype; of a layer or a block (B, L, embed_dim).
        state: the state after the last key, of the kind that the call takes.
    """

    out: Tensor
    state: S


class AttendedPartial(NamedTuple, Generic[S]):
    """Result of a call that goes on from a state, to be combined with attention over other keys.

    Attributes:
        partial: of the queries, ready for `linattn.combine`.
        state: the state after the last key, of the kind that the call takes.
    """

    partial: Partial
    state: S


def combine(*partials: Partial) -> Partial:
    """Combine partial results over disjoint sets of keys into the result over all of them.

        out = Σ_p exp(n_p - n) out_p,   n = log Σ_p exp(n_p)

    Exact, and associative, whichever kernels produced the parts, exact softmax included, as long as each part's
    weights are on the same scale: maps with `softmax_kernel` and `softmax_partial` are on that of exp(scale · q·k).
    Nothing is subtracted, so parts with small normalisers lose no digits. Cost O(P·Lq·Dv) for P parts. Parts of an
    `Expansion` are each expanded around the mean of their own keys: together they are not the expansion of the whole.

    Args:
        *partials: at least one; `out` (B, H, Lq, Dv) and `log_normalizer` (B, H, Lq) of the same shapes. The sets of
            keys must be disjoint: a key seen by two parts counts twice.

    Returns:
        The partial result over the union of the keys; rows that saw no key in any part stay 0 with -inf.

    Raises:
        TypeError: one is no Partial.
        ValueError: no partial was given, or their shapes differ.

    Example:
        >>> import torch
        >>> seen = Partial(torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]]))
        >>> other = Partial(torch.tensor([[[[4.0]]]]), torch.log(torch.tensor([[[2.0]]])))
        >>> combine(seen, other).out.item()
        3.0

    Source: Dao et al. 2022 (FlashAttention, arXiv 2205.14135), section 3.1; Chen et al. 2021 (Scatterbrain, arXiv
        2110.15343) for an exact part beside a kernel part.
    """
    if not partials:
        raise ValueError("combine needs at least one Partial, got none")
    if wrong := [type(p).__name__ for p in partials if not isinstance(p, Partial)]:
        raise TypeError(f"combine takes Partials one by one, got {', '.join(wrong)}; give combine(first, second)")
    shapes = [(tuple(p.out.shape), tuple(p.log_normalizer.shape)) for p in partials]
    if any(shape != shapes[0] for shape in shapes):  # Sizes that a graph leaves open have no hash.
        raise ValueError(
            f"combine needs partials of one shape, got (out, log_normalizer) of {sorted(set(shapes))}; "
            "read the parts with the same queries"
        )
    weights, log_normalizer = shares(torch.stack([p.log_normalizer for p in partials]), 0)
    out = weights[0].unsqueeze(-1) * partials[0].out.to(weights.dtype)
    for weight, part in zip(weights[1:], partials[1:], strict=True):
        out = torch.addcmul(out, weight.unsqueeze(-1), part.out.to(weights.dtype))
    return Partial(out.to(partials[0].out.dtype), log_normalizer)


def exponentials(logs: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """exp(logs) relative to their largest along a dimension, and those, that dimension 1; 0 where all are -inf."""
    peak = logs.detach().amax(dim, keepdim=True) if logs.shape[dim] else logs.new_zeros(1)
    # Where no key is seen any finite reference serves.
    peak = torch.where(peak == -torch.inf, 0, peak)
    return torch.exp(logs - peak), peak


def shares(logs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """exp(logs) over their sum along a dimension, and the logarithm of the sum; 0 and -inf where all are -inf."""
    weights, peak = exponentials(logs, dim)
    total = weights.sum(dim, keepdim=True)
    # Guarded, so that the gradient there is 0 instead of NaN.
    dead = total == 0
    total = torch.where(dead, 1, total)
    return weights / total, torch.where(dead, -torch.inf, total.log() + peak).squeeze(dim)


def joined(parts: list[Partial]) -> Partial:
    """Partial results of consecutive rows as one."""
    return Partial(torch.cat([p.out for p in parts], 3), torch.cat([p.log_normalizer for p in parts], 3))
