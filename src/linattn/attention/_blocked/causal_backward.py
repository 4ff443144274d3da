"""The causal fold pulled back: block by block from the last to the first, features recomputed, no state unwound.

The states before the blocks are recomputed by the forward pass's own absorption, in √N segments of √N blocks, so that
only 2√N states are ever held. Letters as in blocks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention._blocked.absorption import fold_in, key_gradients, rescale, store_masked
from linattn.attention._blocked.blocks import (
    Keys,
    Workspace,
    as_keys,
    block_size,
    blocks,
    joined,
    key_block,
    key_outputs,
    masked_rows,
    new_totals,
    normalised_query_features,
    parted,
    pulled_back,
    traced,
    with_ones,
)
from linattn.attention._blocked.causal import safe_heads
from linattn.attention._blocked.jumps import split, split_gradients, split_rows
from linattn.attention._blocked.reading import divide, live_reference, query_gradient, row_gradients
from linattn.feature_maps import FeatureMap


class Saved(NamedTuple):
    """The forward pass's inputs."""

    mask: Tensor | None
    query: Tensor  # (B, H, G, L, D)
    key: Tensor
    value: Tensor
    moments: Tensor
    m: Tensor

    def part(self, start: int, stop: int) -> Tensor | None:
        """The block's key mask."""
        return None if self.mask is None else self.mask[:, start:stop]

    def key_rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The block's keys and [v, 1]."""
        mask, dtype = self.part(start, stop), self.moments.dtype
        extended = with_ones(masked_rows(self.value[:, :, start:stop], mask, dtype))
        return masked_rows(self.key[:, :, start:stop], mask, dtype), extended


class Before(NamedTuple):
    """The state before a block."""

    moments: Tensor  # (B, H, R, E)
    m: Tensor  # (B, H, M)


class Block(NamedTuple):
    """A block's features, values and the gradients of its row sums."""

    t: Tensor  # (B, H, G·n, R)
    keys: Keys
    mask: Tensor | None
    extended: Tensor  # (B, H, n, E)
    out: Tensor  # (B, H, G·n, Dv)
    den: Tensor  # (B, H, G·n)
    reference: Tensor  # (B, H, G·n)
    grad_out: Tensor  # (B, H, G·n, Dv)
    grad_den: Tensor  # (B, H, G·n)
    groups: int
    exponential: bool
    space: Workspace

    def grad_rows(self, rows: Callable[[], Tensor]) -> Tensor:
        """The gradient (B, H, G·n, E) of the row sums; `rows` recomputes them where only a rounded output was kept."""
        out = self.out if self.out.dtype == self.den.dtype else divide(rows())[0]
        return row_gradients(self.grad_out, self.grad_den, out, self.den)


class Pulled(NamedTuple):
    """Gradients of a block's query and key outputs, of [v, 1] and of the state before it."""

    t: Tensor
    key_outputs: tuple[Tensor, ...]
    extended: Tensor
    moments: Tensor


def backward(
    feature_map: FeatureMap,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of (query, key, value, moments) and of the map's tensors."""
    saved, grad_moments, space = Saved(mask, *inputs), grads[3], Workspace(inputs[3])
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in inputs[:3])
    totals, (batch, heads, groups, length, _) = new_totals(tensors), saved.query.shape
    size = block_size(batch * heads * groups, feature_map.num_features, saved.key.device, is_causal=True)
    for before, start, stop in _states_from_the_last(feature_map, saved, list(blocks(length, size))):
        part, (x_k, extended) = saved.part(start, stop), saved.key_rows(start, stop)
        x_q, out, den, reference, grad_out, grad_den = (
            y[:, :, :, start:stop].flatten(2, 3) for y in (saved.query, *outputs[:3], *grads[:2])
        )
        leaf_q, (t,) = traced(lambda x: (feature_map.query(x),), x_q.to(den.dtype))
        leaf_k, results = traced(lambda x: key_outputs(feature_map, x), x_k)
        keys = as_keys([result.detach() for result in results], feature_map, part)
        rows = (out, den, live_reference(den, reference), grad_out, grad_den)
        block = Block(t.detach(), keys, part, extended, *rows, groups, feature_map.exponential, space)
        pulled = _pull_block(block, before, grad_moments)
        grad_moments = pulled.moments
        grad_x = pulled_back(leaf_q, (t,), (pulled.t,), tensors, totals)
        grad_query[..., start:stop, :] = grad_x.unflatten(2, (groups, stop - start))
        grad_x = pulled_back(leaf_k, results, pulled.key_outputs[: len(results)], tensors, totals)
        store_masked(grad_key[:, :, start:stop], grad_x, part)
        store_masked(grad_value[:, :, start:stop], pulled.extended[..., :-1], part)
    return [grad_query, grad_key, grad_value, grad_moments], totals


def _states_from_the_last(
    feature_map: FeatureMap, saved: Saved, bounds: list[tuple[int, int]]
) -> Iterator[tuple[Before, int, int]]:
    """Each block with the state before it, the last block first."""
    stride, space = max(math.isqrt(len(bounds)), 1), Workspace(saved.moments)
    segments = [bounds[index : index + stride] for index in range(0, len(bounds), stride)]
    entries = [Before(saved.moments, saved.m)]
    for segment in segments[:-1]:
        *_, last = _states(feature_map, saved, entries[-1], segment, space)
        entries.append(_after(feature_map, saved, last, *segment[-1], space))
    for entry, segment in zip(reversed(entries), reversed(segments), strict=False):
        states = list(_states(feature_map, saved, entry, segment, space))
        for before, (start, stop) in zip(reversed(states), reversed(segment), strict=True):
            yield before, start, stop


def _states(
    feature_map: FeatureMap, saved: Saved, before: Before, segment: list[tuple[int, int]], space: Workspace
) -> Iterator[Before]:
    """The states before these consecutive blocks."""
    for index, bound in enumerate(segment):
        yield before
        if index + 1 < len(segment):
            before = _after(feature_map, saved, before, *bound, space)


def _after(feature_map: FeatureMap, saved: Saved, before: Before, start: int, stop: int, space: Workspace) -> Before:
    """The state after a block."""
    x, extended = saved.key_rows(start, stop)
    keys = key_block(feature_map, x, saved.part(start, stop), space)
    c, (S, z) = keys.peak(before.m), parted(before.moments)
    rescale(S, z, before.m, c)
    fold_in(S, z, keys.turned_relative_to(c).flatten(0, 1), extended[..., :-1].flatten(0, 1))
    return Before(joined(S, z, before.moments), c)


def _pull_block(block: Block, before: Before, grad_after: Tensor) -> Pulled:
    """The gradients of one block, from those of its row sums and of the state after it."""
    c = block.keys.peak(before.m)
    safe = safe_heads(block.keys, block.mask, before.m, c)
    joint = _pull_joint(block, before, c, grad_after)
    if safe is None:
        return joint
    apart, where = _pull_split(block, before, c, grad_after), safe[..., None, None]
    chosen = [
        torch.where(where if x.ndim == 4 else where.squeeze(-1), x, y)
        for x, y in zip(joint.key_outputs, apart.key_outputs, strict=True)
    ]
    return Pulled(
        torch.where(where, joint.t, apart.t),
        tuple(chosen),
        torch.where(where, joint.extended, apart.extended),
        torch.where(where, joint.moments, apart.moments),
    )


def _scores(phi_q: Tensor, phi_k: Tensor, groups: int, out: Tensor) -> Tensor:
    """φ(q)φ(k)ᵀ, (B, H, G·n, n), later keys set to 0."""
    torch.matmul(phi_q, phi_k.mT, out=out)
    out.unflatten(-2, (groups, -1)).tril_()
    return out


def _summed(first: Tensor, second: Tensor, other: Tensor, more: Tensor, out: Tensor) -> Tensor:
    """first·second + other·more, heads flattened for the second product."""
    torch.matmul(first, second, out=out)
    out.flatten(0, 1).baddbmm_(other.flatten(0, 1), more.flatten(0, 1))
    return out


def _pull_joint(block: Block, before: Before, c: Tensor, grad_after: Tensor) -> Pulled:
    """A safe block reads the state and its own keys relative to the same exponent."""
    decay, space = (before.m - c).exp().unsqueeze(-1), block.space
    queries, keys = block.t.shape, (*block.extended.shape[:-1], block.t.shape[-1])
    pairs = (*queries[:-1], keys[-2])
    phi_q = normalised_query_features(block.t, c, block.reference, block.exponential, space.buffer("phi_q", *queries))
    phi_k, moments = block.keys.relative_to(c, space.buffer("phi_k", *keys)), before.moments * decay
    weights = _scores(phi_q, phi_k, block.groups, space.buffer("weights", *pairs))
    rows = block.grad_rows(lambda: weights @ block.extended + phi_q @ moments)
    grad_scores = _scores(rows, block.extended, block.groups, space.buffer("grad_scores", *pairs))
    grad_phi_q = _summed(rows, moments.mT, grad_scores, phi_k, space.buffer("grad_q", *queries))
    grad_phi_k = _summed(block.extended, grad_after.mT, grad_scores.mT, phi_q, space.buffer("grad_k", *keys))
    grad_state = grad_after.clone(memory_format=torch.contiguous_format)
    grad_state.flatten(0, 1).baddbmm_(phi_q.flatten(0, 1).mT, rows.flatten(0, 1))
    return Pulled(
        query_gradient(grad_phi_q, phi_q, c, block.reference, block.exponential),
        key_gradients(block.keys, c, phi_k, grad_phi_k),
        _summed(phi_k, grad_after, weights.mT, rows, space.buffer("grad_v", *block.extended.shape)),
        grad_state.mul_(decay),
    )


def _pull_split(block: Block, before: Before, c: Tensor, grad_after: Tensor) -> Pulled:
    """A block whose maximum jumps: the state at its own exponent, and the block's own past cut into rectangles."""
    phi_q = normalised_query_features(block.t, before.m, block.reference, block.exponential)
    phi_k, length = block.keys.relative_to(c), block.extended.shape[2]
    cut = split(block.t, block.keys, block.extended, block.groups, block.exponential)
    rows = block.grad_rows(lambda: split_rows(cut, length, before.moments, before.m)[0])
    inner = split_gradients(cut, length, rows, block.reference)
    grad_phi_q = rows @ before.moments.mT
    grad_t = query_gradient(grad_phi_q, phi_q, before.m, block.reference, block.exponential)
    grad_keys = key_gradients(block.keys, c, phi_k, block.extended @ grad_after.mT)
    return Pulled(
        grad_t + inner[0],
        tuple(a + b for a, b in zip(grad_keys, inner[1], strict=True)),
        phi_k @ grad_after + inner[2],
        grad_after * (before.m - c).exp().unsqueeze(-1) + phi_q.mT @ rows,
    )
