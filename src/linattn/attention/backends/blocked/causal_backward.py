"""The causal fold pulled back: block by block from the last to the first, features recomputed, no state unwound.

The forward pass kept the sums before every segment of blocks; a segment's own sums, and its keys' features, are
computed once more when the sweep reaches it, so that memory does not grow with its number. Letters as in
blocked/__init__.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Running, Workspace
from linattn.attention.backends.blocked.causal import SEGMENT, causal_blocks, hide_later_, safe_heads
from linattn.attention.backends.blocked.features import (
    BiasGradient,
    KeyBlocks,
    Keys,
    MapGradients,
    by_kind,
    normalised_query_features,
    query_block,
    query_gradient,
    query_rows,
    store_masked,
)
from linattn.attention.backends.blocked.grouped_causal import BlockGradients, BlockState, GroupedGradients
from linattn.attention.backends.blocked.jumps import split, split_gradients, split_rows
from linattn.attention.backends.blocked.reading import SavedRows, saved_rows, times_z
from linattn.attention.backends.blocked.records import (
    Causal,
    CausalOutputs,
    Gradients,
    KeyGradients,
    Saved,
    sums_of,
)
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap


def backward(feature_map: FeatureMap, saved: Saved, span: int = 0) -> Gradients:
    """Gradients of (query, key, value, S, z)."""
    inputs: Causal = saved.inputs
    outputs: CausalOutputs = saved.outputs
    fold = by_kind(feature_map, JointGradients, GroupedGradients)(feature_map, saved, span)
    query, key, value = (x.new_empty(x.shape) for x in (inputs.query, inputs.key, inputs.value))
    S, z = (x.clone(memory_format=torch.contiguous_format) for x in (saved.grads.S, saved.grads.z))
    cut = causal_blocks(inputs, span)
    for index in reversed(range(-(-len(cut) // SEGMENT))):
        before = outputs.kept(index) if index else sums_of(inputs)
        for visit in reversed(_segment_states(fold, cut[index * SEGMENT : (index + 1) * SEGMENT], before)):
            block, found = visit.block, fold.pull(visit, S, z)
            target = query[..., block, :]
            target.copy_(found.query.view(target.shape))
            store_masked(key[:, :, block], found.key, fold.keys.bias(block))
            store_masked(value[:, :, block], found.value, fold.keys.bias(block))
            S, z = found.S, found.z
    return Gradients((query, key, value, S, z), fold.of_bias.total, fold.back.totals)


def _segment_states(fold: JointGradients | GroupedGradients, segment: list[slice], before: Sums) -> list[BlockState]:
    """The blocks of a segment, each with the sums before it."""
    found, state = [], Running(before)
    for slot, block in enumerate(segment):
        entry = Sums(*(fold.space.buffer(f"{slot} {i}", *x.shape).copy_(x) for i, x in enumerate(state.views())))
        x, v = fold.keys.tokens(block, f"{slot} "), fold.keys.values(block)
        keys = fold.keys.features(block, x, f"{slot} " if fold.keeps_features else "")
        c = keys.peak(entry.m)
        safe = fold.safe_heads(keys, block, entry.m, c)
        phi_k = keys.turned_relative_to(c)
        found.append(BlockState(block, entry, c, x, keys, phi_k, safe))
        if slot + 1 < len(segment):
            state.rescale(c)
            state.fold_in(phi_k, v)
    return found


class Pulled(NamedTuple):
    """Gradients of what the map returned for a block's queries and keys, of its values and of the sums before it."""

    t: Tensor
    keys: KeyGradients
    value: Tensor  # (B, H, n, Dv)
    S: Tensor
    z: Tensor

    def where(self, safe: Tensor, apart: Pulled) -> Pulled:
        """These in heads (B, H) that are safe, the others elsewhere."""

        def choose(x: Tensor, y: Tensor) -> Tensor:
            return torch.where(safe[..., None, None] if x.ndim == 4 else safe[..., None], x, y)

        keys = self.keys.join(apart.keys, choose)
        value, S, z = choose(self.value, apart.value), choose(self.S, apart.S), choose(self.z, apart.z)
        return Pulled(choose(self.t, apart.t), keys, value, S, z)


class JointGradients:
    """The gradients of blocks whose rows share one exponent."""

    keeps_features = True

    def __init__(self, feature_map: FeatureMap, saved: Saved, span: int) -> None:
        inputs: Causal = saved.inputs
        self.space, self.back = Workspace(inputs.S), MapGradients(feature_map, saved.tensors)
        self.keys = KeyBlocks(feature_map, inputs, self.space)
        self.of_bias = BiasGradient(inputs.bias, wanted=saved.bias_grad)
        self._map, self._saved, self._span, self._groups = feature_map, saved, span, inputs.query.shape[2]

    def safe_heads(self, keys: Keys, block: slice, m: Tensor, c: Tensor) -> Tensor | None:
        """As in the forward pass."""
        return safe_heads(keys, self.keys.bias(block), m, c, self._span)

    def pull(self, visit: BlockState, grad_S: Tensor, grad_z: Tensor) -> BlockGradients:
        """Gradients of a block, from those of the sums after it, which may be written over."""
        x_q, value = query_rows(self._saved.inputs.query, visit.block, self.space), self.keys.values(visit.block)
        rows = saved_rows(self._saved, visit.block, query_block(self._map, x_q, self.space), self.space)
        if visit.safe is None:
            found = self._pull_joint(visit, rows, value, grad_S, grad_z)
        else:
            # The split goes first, and the joint part gets copies, since that writes over t, grad S and grad z.
            apart = self._pull_split(visit, rows, value, grad_S, grad_z)
            found = self._pull_joint(visit, rows, value, grad_S.clone(), grad_z.clone()).where(visit.safe, apart)
        query = self.back.query(x_q, found.t)
        self.of_bias.store(visit.block, found.keys.log)
        return BlockGradients(query, self.back.key(visit.x, found.keys), found.value, found.S, found.z)

    def _pull_joint(self, visit: BlockState, rows: SavedRows, value: Tensor, grad_S: Tensor, grad_z: Tensor) -> Pulled:
        """A safe block reads the sums and its own keys relative to the same exponent."""
        c, space, exponential, groups = visit.c, self.space, self._map.exponential, self._groups
        decay = (visit.before.m - c).exp_()
        S = torch.mul(visit.before.S, decay.unsqueeze(-1), out=space.buffer("S", *visit.before.S.shape)).flatten(0, 1)
        z = (visit.before.z * decay).flatten(0, 1)
        shaped_q = normalised_query_features(rows.t, c, rows.reference, exponential, over=visit.safe is None)
        phi_q, phi_k, v = shaped_q.flatten(0, 1), visit.phi_k.flatten(0, 1), value.flatten(0, 1)
        weights = hide_later_(space.product("weights", phi_q, phi_k.mT), groups, self._span)
        grad_num, grad_den = rows.gradients(
            lambda: (weights @ v + phi_q @ S, weights.sum(-1, keepdim=True) + times_z(phi_q, z)), space
        )
        # Of scores φ(q)φ(k)ᵀ: [grad num, grad den] [v, 1]ᵀ where a row sees the key, (B·H, G·n, n).
        grad_scores = hide_later_(space.product("grad_scores", grad_num, v.mT).add_(grad_den), groups, self._span)
        # Rows read [S, z] and the block's own keys.
        grad_phi_q = space.product("grad_q", grad_num, S.mT).addcmul_(grad_den, z.unsqueeze(-2))
        grad_phi_q.baddbmm_(grad_scores, phi_k)
        # Keys are read by the sums after the block, whose gradient is given, and by its own rows.
        flat_grad_S = grad_S.flatten(0, 1)
        grad_phi_k = space.product("grad_k", v, flat_grad_S.mT).add_(grad_z.flatten(0, 1).unsqueeze(-2))
        grad_phi_k.baddbmm_(grad_scores.mT, phi_q)
        grad_v = space.product("grad_v", phi_k, flat_grad_S).baddbmm_(weights.mT, grad_num)
        # Last, since the products above need the gradient of the sums after the block.
        flat_grad_S.baddbmm_(phi_q.mT, grad_num)
        grad_z.add_(torch.bmm(grad_den.mT, phi_q).view(grad_z.shape))
        return Pulled(
            query_gradient(grad_phi_q.view(shaped_q.shape), shaped_q, c, rows.reference, exponential),
            visit.keys.gradients(c, visit.phi_k, grad_phi_k.view(visit.phi_k.shape)),
            grad_v.view(value.shape),
            grad_S.mul_(decay.unsqueeze(-1)),
            grad_z.mul_(decay),
        )

    def _pull_split(self, visit: BlockState, rows: SavedRows, value: Tensor, grad_S: Tensor, grad_z: Tensor) -> Pulled:
        """A block whose maximum jumps: the sums at their own exponent, and its own past cut into rectangles."""
        (S, z, m), c, exponential = visit.before, visit.c, self._map.exponential
        phi_q = normalised_query_features(rows.t, m, rows.reference, exponential)
        # The segment's pass wrote the features over the exponents, which are wanted here.
        keys = self.keys.features(visit.block, visit.x, "split ")
        cut = split(rows.t, keys, value, self._groups, self._span, exponential)
        length = value.shape[2]
        flat_num, flat_den = rows.gradients(lambda: split_rows(cut, length, visit.before)[:2], self.space)
        grad_num, grad_den = (x.view(*value.shape[:2], *x.shape[1:]) for x in (flat_num, flat_den))
        inner = split_gradients(cut, length, grad_num, grad_den, rows.reference)
        grad_phi_q = grad_num @ S.mT + grad_den * z.unsqueeze(-2)
        grad_t = query_gradient(grad_phi_q, phi_q, m, rows.reference, exponential)
        grad_phi_k = value @ grad_S.mT + grad_z.unsqueeze(-2)
        decay = (m - c).exp_()
        of_state = keys.gradients(c, visit.phi_k, grad_phi_k)
        return Pulled(
            grad_t + inner.t,
            of_state.join(inner.keys, torch.add),
            visit.phi_k @ grad_S + inner.value,
            grad_S * decay.unsqueeze(-1) + phi_q.mT @ grad_num,
            grad_z * decay + (phi_q * grad_den).sum(-2),
        )
