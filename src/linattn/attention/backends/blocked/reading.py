"""Read sums with queries: out = φ(q)ᵀS / φ(q)ᵀz, part by part; letters as in blocked/__init__.py.

A part is a block of tokens, or for grouped maps a chunk of tiles (grouped_reading.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Workspace, blocks
from linattn.attention.backends.blocked.features import (
    KeyBlocks,
    MapGradients,
    by_kind,
    normalised_query_features,
    query_block,
    query_features,
    query_gradient,
    query_rows,
)
from linattn.attention.backends.blocked.grouped_reading import TileGradients, TileReader
from linattn.attention.backends.blocked.records import Causal, Gradients, MassOutputs, Read, Saved, sums_of
from linattn.feature_maps import FeatureMap


def forward(feature_map: FeatureMap, inputs: Read) -> Rows:
    """The output (B, H, G, L, Dv) in the query's dtype, the denominator and its exponent (B, H, G, L)."""
    reader = by_kind(feature_map, BlockReader, TileReader)(feature_map, inputs)
    rows = reader.empty_rows()
    for part in reader.parts():
        reader.read(part, rows)
    finished: Rows = reader.finished(rows)
    return finished


def backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (query, S, z)."""
    reader = by_kind(feature_map, BlockGradients, TileGradients)(feature_map, saved)
    for part in reader.parts():
        reader.pull(part)
    found: Gradients = reader.gradients()
    return found


def mass(feature_map: FeatureMap, inputs: Causal) -> MassOutputs:
    """How much all queries attend to each key: Σ_i a_ij, a_ij = φ(q_i)·φ(k_j) / φ(q_i)ᵀz; 0 for masked keys.

    The queries' features over their denominators are summed first, so that two passes over the tokens give all masses.
    """
    key, sums = inputs.key, sums_of(inputs)
    reader = by_kind(feature_map, BlockReader, TileReader)(feature_map, Read(inputs.query, *sums))
    total = sums.z.new_zeros(sums.z.shape)
    for part in reader.parts():
        reader.add_normalised(part, total)
    found = total.new_empty(key.shape[:3])
    keys = KeyBlocks(feature_map, inputs, Workspace(total))
    for block in blocks(key, feature_map.num_features):
        phi_k = keys.features(block).turned_relative_to(sums.m)
        found[:, :, block] = torch.matmul(phi_k, total.unsqueeze(-1)).squeeze(-1)
    return MassOutputs(found)


class BlockReader:
    """Blocks of queries that read all features."""

    def __init__(self, feature_map: FeatureMap, inputs: Read) -> None:
        self.feature_map, self.inputs, self.space = feature_map, inputs, Workspace(inputs.S)
        self.S, self.z = inputs.S.flatten(0, 1), inputs.z.flatten(0, 1)

    def parts(self) -> list[slice]:
        """Blocks of tokens."""
        return blocks(self.inputs.query, self.feature_map.num_features)

    def empty_rows(self) -> Rows:
        """Memory for the rows."""
        return empty_rows(self.inputs.query, self.inputs.S)

    def read(self, block: slice, rows: Rows) -> None:
        """Write a block's rows."""
        phi_q, reference = self._features(block)
        store_rows(rows, block, self.space.product("num", phi_q, self.S), times_z(phi_q, self.z), reference)

    def finished(self, rows: Rows) -> Rows:
        """The rows as they are."""
        return rows

    def add_normalised(self, block: slice, total: Tensor) -> None:
        """Add Σ_i φ(q_i) / φ(q_i)ᵀz to the total (B, H, R)."""
        phi_q, _ = self._features(block)
        den = times_z(phi_q, self.z)
        total += torch.bmm(den.masked_fill(den == 0, torch.inf).reciprocal_().mT, phi_q).view(total.shape)

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

    def pull(self, block: slice) -> None:
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
        target = self._query[..., block, :]
        target.copy_(self._back.query(x, grad_t).view(target.shape))

    def gradients(self) -> Gradients:
        """After the last block."""
        return Gradients((self._query, self._grad_S, self._grad_z), None, self._back.totals)


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
