"""Exact attention between neighbouring blocks of tokens, its gradients, and both as a fold.

A piece is m consecutive blocks of n rows each, of some heads, so few that their weights stay in a cache. The K keys
around each block are overlapping views: none is copied. The weights are computed once more for gradients.
Letters as in window/__init__.py, N = b·h·m blocks of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends import Backend, Call
from linattn.attention.backends.blocked.fold import Fold, run
from linattn.attention.backends.blocked.records import Gradients, Saved
from linattn.attention.backends.reference import Reference
from linattn.feature_maps import FeatureMap
from linattn.softmax.attention import softmax_rows
from linattn.softmax.partial import Partial
from linattn.softmax.precision import LOG2_E, accumulation_dtype

# Weights held at once: they stay in a second-level cache of 2 MB.
_CHUNK = 2**19


class Near(NamedTuple):
    """Queries of the last of L tokens, and all keys."""

    query: Tensor  # (B, H, G, Lq, D)
    key: Tensor  # (B, H, L, D)
    value: Tensor  # (B, H, L, Dv)
    bias: Tensor | None = None  # (B, H, L), -inf for masked keys, which are 0


class Neighbourhood(NamedTuple):
    """Which keys a row sees: those of its block and of both neighbours, or causally up to its own."""

    window: int  # w
    is_causal: bool
    scale: float

    def all_weights(self, inputs: Near) -> Partial:
        """The rows from every weight, in plain torch."""
        token = torch.arange(inputs.key.shape[2], device=inputs.key.device)
        row = token[token.shape[0] - inputs.query.shape[3] :].unsqueeze(-1)
        near = (row // self.window - token // self.window).abs() <= 1
        visible = near & (token <= row) if self.is_causal else near
        dtype = accumulation_dtype(inputs.query.dtype)
        bias = inputs.query.new_zeros((), dtype=dtype) if inputs.bias is None else inputs.bias[:, :, None, None]
        logits = torch.where(visible, bias, -torch.inf)
        return softmax_rows(inputs.query, inputs.key.unsqueeze(2), inputs.value.unsqueeze(2), logits, self.scale)

    def rows(self, inputs: Near) -> Partial:
        """The rows, piece by piece: time O(Lq·min(L, w)·(D + Dv))."""
        rows = empty_rows(inputs)
        for piece in self.pieces(inputs):
            weights, total, peak = _exponentials(piece.logits(inputs, self.scale)[0])
            num = torch.bmm(weights, piece.of_keys(inputs.value).to(weights.dtype)).div_(total.clamp(min=1))
            out, log = piece.of_rows(rows.out), piece.of_rows(rows.log_normalizer.unsqueeze(-1))
            out.copy_(num.view(out.shape))
            log.copy_(total.log2_().add_(peak).mul_(1 / LOG2_E).view(log.shape))
        return rows

    def gradients(self, inputs: Near, grad: Partial) -> Near:
        """Gradients of all inputs, from those of the rows; in the accumulation dtype but that of the query."""
        of_query = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
        of_key, of_value = (grad.log_normalizer.new_zeros(x.shape) for x in (inputs.key, inputs.value))
        of_bias = None if inputs.bias is None else grad.log_normalizer.new_zeros(inputs.bias.shape)
        columns = grad.out, grad.log_normalizer.unsqueeze(-1)
        for piece in self.pieces(inputs):
            logits, query, key = piece.logits(inputs, self.scale)
            of_out, of_log = (piece.of_rows(x).to(key.dtype).flatten(0, 2).flatten(1, 2) for x in columns)
            # Over their own sum: the logarithm of a normaliser has lost digits where it is large.
            weights, total, _ = _exponentials(logits)
            weights.div_(total.clamp_(min=1))
            of_logits = torch.bmm(of_out, piece.of_keys(inputs.value).to(key.dtype).mT).mul_(weights)
            of_logits.addcmul_(weights, of_logits.sum(-1, keepdim=True).sub_(of_log), value=-1)
            target = piece.of_rows(of_query)
            target.copy_(torch.bmm(of_logits, key).mul_(self.scale).view(target.shape))
            # The queries are times log₂e.
            piece.add_(of_key, torch.bmm(of_logits.mT, query).mul_(1 / LOG2_E))
            piece.add_(of_value, torch.bmm(weights.mT, of_out))
            if of_bias is not None:
                piece.add_(of_bias.unsqueeze(-1), of_logits.sum(1).unsqueeze(-1))
        return Near(of_query, of_key, of_value, of_bias)

    def pieces(self, inputs: Near) -> Iterator[Piece]:
        """All rows: several blocks of a head at once where they see as many keys, or one block of several heads."""
        (batch, heads, groups, num_queries, _), length, w = inputs.query.shape, inputs.key.shape[2], self.window
        first = start = length - num_queries
        while start < length:
            # Whole blocks with whole neighbours; else one block, or what there is of it.
            number = (length - start) // w - (not self.is_causal) if start and start % w == 0 else 1
            number, low = max(number, 1), max(start // w - 1, 0) * w
            stop = min((start // w + number) * w, length)
            size, high = min(stop - start, w), stop if self.is_causal else min((-(-stop // w) + 1) * w, length)
            weights = groups * size * (high - low - (number - 1) * w)
            if number > batch * heads or heads * weights > _CHUNK:
                rows, wide, most = 1, 1, max(_CHUNK // weights, 1)
            else:
                rows, wide, most = max(_CHUNK // (heads * weights), 1), heads, 1
            for b in range(0, batch, rows):
                for h in range(0, heads, wide):
                    for i in range(0, number, most):
                        count, at, ahead = min(most, number - i), start + i * w - first, high - stop
                        end = at + count * size
                        seen = slice(low + i * w, end + first + ahead)
                        yield Piece(slice(b, b + rows), slice(h, h + wide), count, slice(at, end), seen, self)
            start = stop


class Piece(NamedTuple):
    """Some rows, and the keys around them; several blocks are of one head of one batch."""

    batch: slice
    heads: slice
    num_blocks: int  # m
    rows: slice  # of the queries
    keys: slice
    around: Neighbourhood

    def of_rows(self, x: Tensor) -> Tensor:
        """The rows of x (B, H, G, Lq, ·), a view (b, h, m, G, n, ·)."""
        return torch.unflatten(x[self.batch, self.heads, :, self.rows], 3, (self.num_blocks, -1)).transpose(2, 3)

    def of_keys(self, x: Tensor) -> Tensor:
        """The keys around each block of x (B, H, L, ·), (N, K, ·)."""
        keys, window = x[self.batch, self.heads, self.keys], self.around.window
        return keys.unfold(2, keys.shape[2] - (self.num_blocks - 1) * window, window).flatten(0, 2).mT

    def add_(self, x: Tensor, grad: Tensor) -> None:
        """Add gradients (N, K, ·) of the keys around each block to those of x (B, H, L, ·)."""
        keys, count = x[self.batch, self.heads, self.keys], self.num_blocks
        parts = grad.unflatten(0, (*keys.shape[:2], count))
        step = self.around.window if count > 1 else grad.shape[1]
        for at in range(0, grad.shape[1], step):
            keys[:, :, at : at + count * step].unflatten(2, (count, step)).add_(parts[..., at : at + step, :])

    def logits(self, inputs: Near, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of base 2 (N, G·n, K), the queries times scale·log₂e, and the keys."""
        rows, dtype = self.of_rows(inputs.query), accumulation_dtype(inputs.query.dtype)
        query = (rows.to(dtype) * (scale * LOG2_E)).flatten(0, 2).flatten(1, 2)
        key, number = self.of_keys(inputs.key).to(dtype), rows.shape[4]
        logits = torch.bmm(query, key.mT)
        if inputs.bias is not None:
            logits.add_(self.of_keys(inputs.bias.unsqueeze(-1)).mT, alpha=LOG2_E)
        if self.around.is_causal and number > 1:
            later = logits.new_full((number, number), -torch.inf).triu_(1)
            logits.unflatten(1, (-1, number))[..., -number:].add_(later)
        return logits, query, key


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """2^logits (N, n, K), written over them, of each row's largest; their sums, 0 or at least 1, and those."""
    peak = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    weights = logits.sub_(peak).exp2_()
    return weights, weights.sum(-1, keepdim=True), peak


def empty_rows(inputs: Near) -> Partial:
    """Memory for the rows (B, H, G, Lq, Dv) and their log-normalisers."""
    query = inputs.query
    out = query.new_empty(*query.shape[:-1], inputs.value.shape[-1])
    return Partial(out, query.new_empty(query.shape[:-1], dtype=accumulation_dtype(query.dtype)))


def near(call: Call, backend: Backend, window: int) -> Partial:
    """Softmax of a call's rows, of the last of its tokens, over their block and both neighbours, or causally."""
    bias = None if call.bias is None else call.bias.expand(call.key.shape[:3])
    inputs, feature_map = Near(call.query, call.key, call.value, bias), call.bound.feature_map
    if isinstance(backend, Reference):
        # Autograd alone follows the reference, any number of times.
        return Neighbourhood(window, call.is_causal, feature_map.scale).all_weights(inputs)
    return Partial(*run(CAUSAL if call.is_causal else NEAR, call.bound, inputs, window))


def _fold(name: str, *, is_causal: bool) -> Fold:
    """The fold of this name in this file; the map's tensors have no part in it but its scale."""

    def forward(feature_map: FeatureMap, inputs: Near, window: int) -> Partial:
        return Neighbourhood(window, is_causal, feature_map.scale).rows(inputs)

    def backward(feature_map: FeatureMap, saved: Saved, window: int) -> Gradients:
        around, inputs = Neighbourhood(window, is_causal, feature_map.scale), saved.inputs
        *grads, of_bias = around.gradients(inputs, saved.grads)
        of_tokens = [grad.to(x.dtype) for grad, x in zip(grads, inputs[:3], strict=True)]
        return Gradients(of_tokens, of_bias if saved.bias_grad else None, [torch.zeros_like(x) for x in saved.tensors])

    return Fold(f"{__name__}:{name}", forward, backward, Near, Partial, lambda inputs, _: empty_rows(inputs))


NEAR, CAUSAL = _fold("NEAR", is_causal=False), _fold("CAUSAL", is_causal=True)
