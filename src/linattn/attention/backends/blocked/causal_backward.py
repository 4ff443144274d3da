"""The causal fold pulled back: block by block from the last to the first, features recomputed, no state unwound.

The forward pass kept the state before every segment of blocks; a segment's own states, and its keys' features, are
computed once more when the sweep reaches it, so that memory does not grow with its number. Letters as in
blocked/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.absorption import store_masked
from linattn.attention.backends.blocked.blocks import Running, Workspace, block_size, blocks, columns
from linattn.attention.backends.blocked.causal import SEGMENT, hide_later_, safe_heads
from linattn.attention.backends.blocked.features import (
    BiasGradient,
    Gradients,
    Keys,
    MapGradients,
    key_block,
    normalised_query_features,
    query_block,
    query_gradient,
)
from linattn.attention.backends.blocked.jumps import split, split_gradients, split_rows
from linattn.attention.backends.blocked.reading import divide, live_reference, row_gradients, times_z
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap


class Saved(NamedTuple):
    """What the forward pass was given."""

    bias: Tensor | None
    query: Tensor  # (B, H, G, L, D)
    key: Tensor
    value: Tensor
    S: Tensor
    z: Tensor
    m: Tensor


class BlockState(NamedTuple):
    """A block as the recomputation of its segment left it."""

    before: Sums
    c: Tensor  # the exponent after it, (B, H, M)
    keys: Keys  # an exponential map's are turned relative to c
    phi_k: Tensor  # (B, H, n, R), relative to c
    safe: Tensor | None
    start: int
    stop: int


class Rows(NamedTuple):
    """A block's queries: what the map says of them, and the gradients of their row sums."""

    t: Tensor  # (B, H, G·n, R)
    out: Tensor | None  # (B, H, G·n, Dv), None where only a rounded one was kept
    den: Tensor  # (B, H, G·n)
    reference: Tensor  # (B, H, G·n)
    grad_out: Tensor  # (B, H, G·n, Dv)
    grad_den: Tensor  # (B, H, G·n)

    def gradients(self, sums: Callable[[], tuple[Tensor, Tensor]], space: Workspace) -> tuple[Tensor, Tensor]:
        """The gradients (B, H, G·n, Dv) and (B, H, G·n, 1) of num and den, which `sums` recomputes where needed."""
        out = divide(*sums()) if self.out is None else self.out
        return row_gradients(self.grad_out, self.grad_den, out.view(self.grad_out.shape), self.den, space)


class Pulled(NamedTuple):
    """Gradients of a block's query and key outputs, of its values and of the state before it."""

    t: Tensor
    keys: tuple[Tensor, ...]
    value: Tensor  # (B, H, n, Dv)
    S: Tensor
    z: Tensor


def backward(
    feature_map: FeatureMap,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    bias_grad: bool,
    span: int = 0,
) -> Gradients:
    """Gradients of (query, key, value, S, z)."""
    sweep = Sweep(feature_map, Saved(bias, *inputs), outputs, grads, span)
    saved, back, space = sweep.saved, MapGradients(feature_map, tensors), sweep.space
    of_bias = BiasGradient(bias, wanted=bias_grad)
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in inputs[:3])
    batch, heads, groups, length, _ = saved.query.shape
    size = block_size(batch * heads * groups, feature_map.num_features, saved.key.device, is_causal=True, span=span)
    bounds = list(blocks(length, size))
    segments = [bounds[index : index + SEGMENT] for index in range(0, len(bounds), SEGMENT)]
    for index in reversed(range(len(segments))):
        for visit in reversed(sweep.visits(index, segments[index])):
            start, stop = visit.start, visit.stop
            part, (x_k, v) = columns(bias, start, stop), sweep.key_rows(start, stop)
            x_q = space.rows("q", saved.query[..., start:stop, :]).flatten(2, 3)
            pulled = sweep.pull(visit, sweep.rows(x_q, start, stop), v)
            grad_x = back.query(x_q, pulled.t)
            grad_query[..., start:stop, :] = grad_x.unflatten(2, (groups, stop - start))
            of_bias.store(start, stop, pulled.keys)
            store_masked(grad_key[:, :, start:stop], back.key(x_k, pulled.keys), part)
            store_masked(grad_value[:, :, start:stop], pulled.value, part)
    of_inputs = [grad_query, grad_key, grad_value, sweep.grad_S, sweep.grad_z]
    return Gradients(of_inputs, of_bias.total, back.totals)


class Sweep:
    """The backward sweep: the gradients of the state, and what every block needs.

    Attributes:
        grad_S: the gradient of the state after the block that comes next, (B, H, R, Dv).
        grad_z: (B, H, R).
    """

    def __init__(
        self, feature_map: FeatureMap, saved: Saved, outputs: Sequence[Tensor], grads: Sequence[Tensor], span: int
    ) -> None:
        self.saved, self.space = saved, Workspace(saved.S)
        self.grad_S, self.grad_z = (x.clone(memory_format=torch.contiguous_format) for x in grads[3:5])
        self._map, self._outputs, self._grads, self._span = feature_map, outputs, grads, span
        self._checkpoints = outputs[6:]

    def key_rows(self, start: int, stop: int, slot: str = "") -> tuple[Tensor, Tensor]:
        """A block's keys and values; a block of the segment keeps its keys, which may be its features, in a slot."""
        x, v = (y[:, :, start:stop] for y in (self.saved.key, self.saved.value))
        part = columns(self.saved.bias, start, stop)
        return self.space.rows(f"{slot} k", x, part), self.space.rows("v", v, part)

    def rows(self, x_q: Tensor, start: int, stop: int) -> Rows:
        """A block's rows."""
        out, grad_out = (
            self.space.rows(name, y[:, :, :, start:stop]).flatten(2, 3)
            for name, y in (("out", self._outputs[0]), ("grad_out", self._grads[0]))
        )
        den, reference, grad_den = (y[:, :, :, start:stop].flatten(2, 3) for y in (*self._outputs[1:3], self._grads[1]))
        # Rounded outputs would cost the gradient its digits where attention is nearly uniform.
        kept = out if self._outputs[0].dtype == den.dtype else None
        t = query_block(self._map, x_q, self.space)
        return Rows(t, kept, den, live_reference(den, reference), grad_out, grad_den)

    def visits(self, index: int, segment: list[tuple[int, int]]) -> list[BlockState]:
        """The blocks of a segment, each with the state before it."""
        before = self.saved[4:] if index == 0 else [x[:, index - 1] for x in self._checkpoints]
        found, state = [], Running(Sums(*before))
        for slot, (start, stop) in enumerate(segment):
            entry = Sums(*(self._kept(f"{slot} {i}", x) for i, x in enumerate(state.views())))
            part, (x, v) = columns(self.saved.bias, start, stop), self.key_rows(start, stop, str(slot))
            buffer = self.space.buffer(f"{slot} keys", *x.shape[:-1], self._map.num_features)
            keys = key_block(self._map, x, part, buffer)
            c = keys.peak(entry.m)
            safe = safe_heads(keys, part, entry.m, c, self._span)
            phi_k = keys.turned_relative_to(c)
            found.append(BlockState(entry, c, keys, phi_k, safe, start, stop))
            if slot + 1 < len(segment):
                state.rescale(c)
                state.fold_in(phi_k.flatten(0, 1), v.flatten(0, 1))
        return found

    def _kept(self, name: str, x: Tensor) -> Tensor:
        """A copy in a buffer."""
        return self.space.buffer(name, *x.shape).copy_(x)

    def pull(self, visit: BlockState, rows: Rows, value: Tensor) -> Pulled:
        """The gradients of one block, from those of its row sums and of the state after it, which moves before it."""
        if visit.safe is None:
            pulled = self._pull_joint(visit, rows, value)
        else:
            apart, where = self._pull_split(visit, rows, value), visit.safe[..., None, None]
            joint = self._pull_joint(visit, rows, value)
            pulled = Pulled(
                torch.where(where, joint.t, apart.t),
                tuple(
                    torch.where(where if x.ndim == 4 else where.squeeze(-1), x, y)
                    for x, y in zip(joint.keys, apart.keys, strict=True)
                ),
                torch.where(where, joint.value, apart.value),
                torch.where(where, joint.S, apart.S),
                torch.where(where.squeeze(-1), joint.z, apart.z),
            )
        self.grad_S, self.grad_z = pulled.S, pulled.z
        return pulled

    def _pull_joint(self, visit: BlockState, rows: Rows, value: Tensor) -> Pulled:
        """A safe block reads the state and its own keys relative to the same exponent."""
        c, space, exponential = visit.c, self.space, self._map.exponential
        groups = self.saved.query.shape[2]
        decay = (visit.before.m - c).exp_()
        S = torch.mul(visit.before.S, decay.unsqueeze(-1), out=space.buffer("S", *visit.before.S.shape)).flatten(0, 1)
        z, grad_S, grad_z = (visit.before.z * decay).flatten(0, 1), self.grad_S, self.grad_z
        shaped_q = normalised_query_features(rows.t, c, rows.reference, exponential, over=visit.safe is None)
        phi_q, phi_k, v = shaped_q.flatten(0, 1), visit.phi_k.flatten(0, 1), value.flatten(0, 1)
        weights = hide_later_(space.product("weights", phi_q, phi_k.mT), groups, self._span)
        grad_num, grad_den = rows.gradients(
            lambda: (weights @ v + phi_q @ S, weights.sum(-1, keepdim=True) + times_z(phi_q, z)), space
        )
        grad_num, grad_den = grad_num.flatten(0, 1), grad_den.flatten(0, 1)
        grad_scores = hide_later_(space.product("grad_scores", grad_num, v.mT).add_(grad_den), groups, self._span)
        grad_phi_q = space.product("grad_q", grad_num, S.mT).addcmul_(grad_den, z.unsqueeze(-2))
        grad_phi_q.baddbmm_(grad_scores, phi_k)
        flat_grad_S = grad_S.flatten(0, 1)
        grad_phi_k = space.product("grad_k", v, flat_grad_S.mT).add_(grad_z.flatten(0, 1).unsqueeze(-2))
        grad_phi_k.baddbmm_(grad_scores.mT, phi_q)
        grad_v = space.product("grad_v", phi_k, flat_grad_S).baddbmm_(weights.mT, grad_num)
        # In the sweep's own memory, except where heads differ and both results are needed.
        if visit.safe is not None:
            grad_S, grad_z = grad_S.clone(), grad_z.clone()
        grad_S.flatten(0, 1).baddbmm_(phi_q.mT, grad_num)
        grad_z.add_(torch.bmm(grad_den.mT, phi_q).view(grad_z.shape))
        return Pulled(
            query_gradient(grad_phi_q.view(shaped_q.shape), shaped_q, c, rows.reference, exponential),
            visit.keys.gradients(c, visit.phi_k, grad_phi_k.view(visit.phi_k.shape)),
            grad_v.view(value.shape),
            grad_S.mul_(decay.unsqueeze(-1)),
            grad_z.mul_(decay),
        )

    def _pull_split(self, visit: BlockState, rows: Rows, value: Tensor) -> Pulled:
        """A block whose maximum jumps: the state at its own exponent, and the block's own past cut into rectangles."""
        (S, z, m), c, length = visit.before, visit.c, visit.stop - visit.start
        exponential, groups = self._map.exponential, self.saved.query.shape[2]
        phi_q = normalised_query_features(rows.t, m, rows.reference, exponential)
        # The segment's pass wrote the features over the exponents, which are wanted here.
        x, part = self.key_rows(visit.start, visit.stop)[0], columns(self.saved.bias, visit.start, visit.stop)
        keys = key_block(self._map, x, part, x.new_empty(visit.phi_k.shape))
        cut = split(rows.t, keys, value, groups, self._span, exponential)
        grad_num, grad_den = rows.gradients(lambda: split_rows(cut, length, visit.before)[:2], self.space)
        inner = split_gradients(cut, length, grad_num, grad_den, rows.reference)
        grad_phi_q = grad_num @ S.mT + grad_den * z.unsqueeze(-2)
        grad_t = query_gradient(grad_phi_q, phi_q, m, rows.reference, exponential)
        grad_phi_k = value @ self.grad_S.mT + self.grad_z.unsqueeze(-2)
        decay = (m - c).exp_()
        return Pulled(
            grad_t + inner[0],
            tuple(a + b for a, b in zip(keys.gradients(c, visit.phi_k, grad_phi_k), inner[1], strict=True)),
            visit.phi_k @ self.grad_S + inner[2],
            self.grad_S * decay.unsqueeze(-1) + phi_q.mT @ grad_num,
            self.grad_z * decay + (phi_q * grad_den).sum(-2),
        )
