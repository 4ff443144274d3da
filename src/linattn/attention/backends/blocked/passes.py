"""One pass over keys, S += φ(k)vᵀ and z += Σ φ(k), or over queries, out = φ(q)ᵀS / φ(q)ᵀz, part by part.

A part is a block of tokens, or where a grouped map reads a chunk of tiles (grouped_reading.py). Letters as in
blocked/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Running, Workspace, blocks
from linattn.attention.backends.blocked.features import (
    BiasGradient,
    KeyBlocks,
    MapGradients,
    normalised_query_features,
    query_block,
    query_features,
    query_gradient,
    query_rows,
    store_masked,
    store_queries,
)
from linattn.attention.backends.blocked.grouped_reading import TileGradients, TileReader
from linattn.attention.backends.blocked.records import Absorb, Causal, Gradients, MassOutputs, Read, Saved, sums_of
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap, GroupedFeatureMap


def absorb(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    state = Running(sums_of(inputs))
    keys = KeyBlocks(feature_map, inputs, Workspace(inputs.S))
    for block in blocks(inputs.key, feature_map.num_features):
        found = keys.features(block)
        # The sums move to the new maximum first, so that the features' exponents are at most 0.
        state.rescale(found.peak(state.m))
        state.fold_in(found.turned_relative_to(state.m), keys.values(block))
    return state.sums()


def absorb_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (key, value, S, z); features are recomputed relative to the final m."""
    inputs: Absorb = saved.inputs
    m, (grad_S, grad_z, _), space = saved.outputs.m, saved.grads, Workspace(inputs.m)
    keys = KeyBlocks(feature_map, inputs, space)
    back, of_bias = MapGradients(feature_map, saved.tensors), BiasGradient(inputs.bias, wanted=saved.bias_grad)
    flat_grad_S, row_grad_z = grad_S.flatten(0, 1), grad_z.unsqueeze(-2)
    grad_key, grad_value = (x.new_empty(x.shape) for x in (inputs.key, inputs.value))
    for block in blocks(inputs.key, feature_map.num_features):
        x, v, masked = keys.tokens(block), keys.values(block), keys.masked(block)
        found = keys.features(block, x)
        phi_k = found.turned_relative_to(m)
        # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
        grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
        grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
        store_masked(grad_value[:, :, block], masked, grad_v.view(v.shape))
        of_outputs = found.gradients(m, phi_k, grad_phi)
        of_bias.store(block, masked, of_outputs.log)
        back.key(x, of_outputs, partial(store_masked, grad_key[:, :, block], masked))
    decay = per_feature((inputs.m - m).exp_(), grad_z.shape[-1])
    of_inputs = [grad_key, grad_value, grad_S * decay.unsqueeze(-1), grad_z * decay]
    return Gradients(of_inputs, of_bias.total, back.finish())


def read(feature_map: FeatureMap, inputs: Read) -> Rows:
    """The output (B, H, G, L, Dv) in the query's dtype, the denominator and its exponent (B, H, G, L)."""
    return _reader(feature_map, inputs).rows()


def read_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (query, S, z)."""
    if isinstance(feature_map, GroupedFeatureMap):
        return TileGradients(feature_map, saved).gradients()
    return BlockGradients(feature_map, saved).gradients()


def mass(feature_map: FeatureMap, inputs: Causal) -> MassOutputs:
    """How much all queries attend to each key: Σ_i a_ij, a_ij = φ(q_i)·φ(k_j) / φ(q_i)ᵀz; 0 for masked keys.

    The queries' features over their denominators are summed first, so that two passes over the tokens give all masses.
    """
    key, sums = inputs.key, sums_of(inputs)
    total = _reader(feature_map, Read(inputs.query, *sums)).normalised()
    found = total.new_empty(key.shape[:3])
    keys = KeyBlocks(feature_map, inputs, Workspace(total))
    for block in blocks(key, feature_map.num_features):
        phi_k = keys.features(block).turned_relative_to(sums.m)
        found[:, :, block] = torch.matmul(phi_k, total.unsqueeze(-1)).squeeze(-1)
    return MassOutputs(found)


def _reader(feature_map: FeatureMap, inputs: Read) -> BlockReader | TileReader:
    """What reads for this kind of map."""
    if isinstance(feature_map, GroupedFeatureMap):
        return TileReader(feature_map, inputs)
    return BlockReader(feature_map, inputs)


class BlockReader:
    """Blocks of queries that read all features."""

    def __init__(self, feature_map: FeatureMap, inputs: Read) -> None:
        self.feature_map, self.inputs, self.space = feature_map, inputs, Workspace(inputs.S)
        self.S, self.z = inputs.S.flatten(0, 1), inputs.z.flatten(0, 1)
        self.blocks = blocks(inputs.query, feature_map.num_features)

    def rows(self) -> Rows:
        """All rows."""
        rows = empty_rows(self.inputs.query, self.inputs.S)
        for block in self.blocks:
            phi_q, reference = self._features(block)
            store_rows(rows, block, self.space.product("num", phi_q, self.S), times_z(phi_q, self.z), reference)
        return rows

    def normalised(self) -> Tensor:
        """Σ_i φ(q_i) / φ(q_i)ᵀz, (B, H, R)."""
        total = torch.zeros_like(self.inputs.z, memory_format=torch.contiguous_format)
        for block in self.blocks:
            phi_q, _ = self._features(block)
            den = times_z(phi_q, self.z)
            total += torch.bmm(den.masked_fill(den == 0, torch.inf).reciprocal_().mT, phi_q).view(total.shape)
        return total

    def _features(self, block: slice) -> tuple[Tensor, Tensor]:
        """Features (B·H, G·n, R) and their exponents (B, H, G·n)."""
        t = query_block(self.feature_map, query_rows(self.inputs.query, block, self.space), self.space)
        phi_q, reference = query_features(t, self.inputs.m, self.feature_map.exponential, over=True)
        return phi_q.flatten(0, 1), reference


class BlockGradients(BlockReader):
    """The gradients of what blocks read."""

    def __init__(self, feature_map: FeatureMap, saved: Saved) -> None:
        super().__init__(feature_map, saved.inputs)
        self._saved, self._back = saved, MapGradients(feature_map, saved.tensors)
        query, S, z, _ = self.inputs
        self._query, self._grad_S, self._grad_z = (
            query.new_empty(query.shape),
            S.new_zeros(S.shape),
            torch.zeros_like(z),
        )

    def gradients(self) -> Gradients:
        """Those of all inputs."""
        for block in self.blocks:
            self._pull(block)
        return Gradients((self._query, self._grad_S, self._grad_z), None, self._back.finish())

    def _pull(self, block: slice) -> None:
        """Store the gradient of a block's queries, add those of S and z."""
        m, exponential, space = self.inputs.m, self.feature_map.exponential, self.space
        x = query_rows(self.inputs.query, block, space)
        rows = saved_rows(self._saved, block, query_block(self.feature_map, x, space), space)
        phi_q = normalised_query_features(rows.t, m, rows.reference, exponential, over=True)
        flat_phi = phi_q.flatten(0, 1)
        grad_num, grad_den = rows.gradients(lambda: (flat_phi @ self.S, times_z(flat_phi, self.z)), space)
        self._grad_S.flatten(0, 1).baddbmm_(flat_phi.mT, grad_num)
        self._grad_z.add_(torch.bmm(grad_den.mT, flat_phi).view(self._grad_z.shape))
        # grad φ(q) = [grad num, grad den] [S, z]ᵀ.
        grad_phi = space.product("grad", grad_num, self.S.mT).addcmul_(grad_den, self.z.unsqueeze(-2))
        grad_t = query_gradient(grad_phi.view(phi_q.shape), phi_q, m, rows.reference, exponential)
        self._back.query(x, grad_t, partial(store_queries, self._query[..., block, :]))


class SavedRows(NamedTuple):
    """A block of rows as the forward pass left them, and the gradients of its outputs."""

    t: Tensor  # (B, H, G·n, R), what the map returns for the queries
    out: Tensor | None  # (B, H, G·n, Dv), None where only a rounded one was kept
    den: Tensor  # (B, H, G·n)
    reference: Tensor  # (B, H, G·n)
    grad_out: Tensor  # (B, H, G·n, Dv)
    grad_den: Tensor  # (B, H, G·n)

    def gradients(self, sums: Callable[[], tuple[Tensor, Tensor]], space: Workspace) -> tuple[Tensor, Tensor]:
        """The gradients (B·H, G·n, Dv) and (B·H, G·n, 1) of num and den, which `sums` recomputes where needed."""
        out, den = self.out, self.den.unsqueeze(-1)
        if out is None:
            num, total = sums()
            out = (num / total.masked_fill(total == 0, torch.inf)).view(self.grad_out.shape)
        # A denormal sum has no inverse within the dtype: its row passes no gradient on, instead of NaN to every key.
        dead = (self.den.abs() < torch.finfo(den.dtype).tiny).unsqueeze(-1)
        inverse = den.reciprocal().masked_fill_(dead, 0)
        # out = num/den: grad num = grad out/den, grad den = grad den - grad num·out.
        grad_num = torch.mul(self.grad_out, inverse, out=space.buffer("grad_num", *out.shape))
        from_out = torch.mul(grad_num, out, out=space.buffer("from_out", *out.shape)).sum(-1, keepdim=True)
        grad_den = torch.sub(self.grad_den.unsqueeze(-1).masked_fill(dead, 0), from_out)
        return grad_num.flatten(0, 1), grad_den.flatten(0, 1)


def saved_rows(saved: Saved, block: slice, t: Tensor, space: Workspace) -> SavedRows:
    """A block's rows, from outputs and gradients that begin as Rows do."""
    out, grad_out = (
        space.rows(name, x[..., block, :]).flatten(2, 3)
        for name, x in (("out", saved.outputs.out), ("grad_out", saved.grads.out))
    )
    rows = (saved.outputs.den, saved.outputs.reference, saved.grads.den)
    den, reference, grad_den = (x[..., block].flatten(2, 3) for x in rows)
    # Rounded outputs would cost the gradient its digits where attention is nearly uniform.
    kept = out if saved.outputs.out.dtype == den.dtype else None
    # An infinite exponent makes the features of rows that saw no key 0 instead of overflowing.
    return SavedRows(t, kept, den, reference.masked_fill(den == 0, torch.inf), grad_out, grad_den)


def empty_rows(query: Tensor, S: Tensor) -> Rows:
    """Memory for the rows of queries (B, H, G, L, D)."""
    den = S.new_empty(query.shape[:-1])
    return Rows(query.new_empty(*query.shape[:-1], S.shape[-1]), den, torch.empty_like(den))


def store_rows(rows: Rows, block: slice, num: Tensor, total: Tensor, reference: Tensor) -> None:
    """Write a block's num/total, total and exponents; a row that saw no key (total = 0) gives 0."""
    out, den = rows.out[..., block, :], rows.den[..., block]
    den.copy_(total.reshape(den.shape))
    total = total.masked_fill(total == 0, torch.inf).reshape(*den.shape, 1)
    if out.dtype == num.dtype:
        torch.div(num.view(out.shape), total, out=out)
    else:
        out.copy_(num.view(out.shape).div_(total))
    rows.reference[..., block] = reference.reshape(den.shape)


def times_z(phi_q: Tensor, z: Tensor) -> Tensor:
    """φ(q)·z, (B·H, n, 1); this way round it is a product of a row and a matrix, which runs several times as fast."""
    return torch.bmm(z.unsqueeze(-2), phi_q.mT).mT
