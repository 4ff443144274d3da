"""One pass over queries, out = φ(q)ᵀS / φ(q)ᵀz, part by part, and back.

A part is a block of tokens, or where a grouped map reads a chunk of tiles (grouped_reading.py). Letters as in
blocked/__init__.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Workspace, add_product_, blocks, by_columns
from linattn.attention.backends.blocked.bounded import (
    bounded_powers,
    by_head,
    common_exponent,
    fits_denominators,
    fits_rows,
    fits_sums,
    parts,
    store_bounded,
    stretches,
    whole,
    write_powers,
)
from linattn.attention.backends.blocked.features import (
    KeyBlocks,
    MapGradients,
    normalised_query_features,
    query_block,
    query_features,
    query_gradient,
    query_rows,
    store_queries,
)
from linattn.attention.backends.blocked.grouped_reading import TileGradients, TileReader
from linattn.attention.backends.blocked.records import Causal, Gradients, MassOutputs, Read, Saved, sums_of
from linattn.attention.backends.blocked.rows import (
    SavedRows,
    empty_rows,
    rows_of,
    saved_rows,
    store_rows,
    times_z,
    zeros_of,
)
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.feature_maps._powers import Powers


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
        self.powers = bounded_powers(feature_map, inputs.query, inputs.S)
        self.blocks = blocks(inputs.query, feature_map.num_features)
        if self.powers is not None:
            self._c, is_common = common_exponent(inputs.m)
            self._fits = is_common & fits_sums(inputs.S, inputs.z)

    def rows(self) -> Rows:
        """All rows."""
        rows = empty_rows(self.inputs.query, self.inputs.S)
        for stretch in stretches(self.blocks, self.inputs.query, self.inputs.S):
            if self.powers is None:
                self._store(rows, stretch)
            else:
                self._store_by_head(self.powers, rows, stretch)
        return rows

    def normalised(self) -> Tensor:
        """Σ_i φ(q_i) / φ(q_i)ᵀz, (B, H, R)."""
        total = torch.zeros_like(self.inputs.z, memory_format=torch.contiguous_format)
        for block in self.blocks:
            phi_q, _ = self._features(block)
            den = times_z(phi_q, self.z)
            total += torch.bmm(den.masked_fill(den == 0, torch.inf).reciprocal_().mT, phi_q).view(total.shape)
        return total

    def _store(self, rows: Rows, stretch: list[slice]) -> None:
        """A stretch of rows, whatever the queries."""
        for block in stretch:
            phi_q, reference = self._features(block)
            store_rows(rows, block, self.space.product("num", phi_q, self.S), times_z(phi_q, self.z), reference)

    def _features(self, block: slice) -> tuple[Tensor, Tensor]:
        """Features (B·H, G·n, R) and their exponents (B, H, G·n)."""
        t = query_block(self.feature_map, query_rows(self.inputs.query, block, self.space), self.space)
        phi_q, reference = query_features(t, self.inputs.m, self.feature_map.exponential, over=True)
        return phi_q.flatten(0, 1), reference

    def _store_by_head(self, powers: Powers, rows: Rows, stretch: list[slice]) -> None:
        """A stretch of rows, bounded in the heads where that holds."""
        of_stretch, z = rows_of(rows, whole(stretch)), self.z.unsqueeze(-2)
        query, reference, fits = self._bounded(powers, whole(stretch))

        def bounded() -> Tensor:
            out, den = of_stretch[:2]
            for x, of_out, of_den in zip(*(parts(x, stretch, 3) for x in (query, out, den)), strict=True):
                phi_q = write_powers(powers, x, "queries", self.space)
                total = self.space.product("den", z, phi_q.mT)
                store_bounded(of_out, of_den, self.space.product("num", phi_q, self.S), total)
            of_stretch.reference.copy_(reference)
            return fits_denominators(den)

        # Heads in which a stretch was tried in vain are tried no more.
        self._fits &= ~fits | by_head(fits, bounded, lambda: self._store(rows, stretch), (), of_stretch)

    def _bounded(self, powers: Powers, tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (B, H, G, n, D), their exponents (B, H, G, n), and the heads (B, H) where they are short."""
        query = self.space.rows("q", self.inputs.query[..., tokens, :])
        term = powers.term(query)
        fits = self._fits & fits_rows(powers, term)
        return query, term.add_(self._c[..., None, None]), fits


class BlockGradients(BlockReader):
    """The gradients of what blocks read."""

    def __init__(self, feature_map: FeatureMap, saved: Saved) -> None:
        super().__init__(feature_map, saved.inputs)
        self._saved, self._back = saved, MapGradients(feature_map, saved.tensors)
        query, S, z, _ = self.inputs
        self._query, self._grad_S, self._grad_z = query.new_empty(query.shape), by_columns(zeros_of(S)), zeros_of(z)

    def gradients(self) -> Gradients:
        """Those of all inputs."""
        for stretch in stretches(self.blocks, self.inputs.query, self.inputs.S):
            if self.powers is None:
                self._pull(stretch)
            else:
                self._pull_by_head(self.powers, stretch)
        return Gradients((self._query, self._grad_S.contiguous(), self._grad_z), None, self._back.finish())

    def _pull_by_head(self, powers: Powers, stretch: list[slice]) -> None:
        """A stretch, bounded in the heads where the forward pass was."""
        tokens = whole(stretch)
        _, reference, fits = self._bounded(powers, tokens)
        fits = fits & (reference == self._saved.outputs.reference[..., tokens]).flatten(2).all(-1)

        def bounded() -> None:
            for block in stretch:
                self._pull_bounded(powers, block)

        sums, written = (self._grad_S, self._grad_z), (self._query[..., tokens, :],)
        by_head(fits, bounded, lambda: self._pull(stretch), sums, written)

    def _pull_bounded(self, powers: Powers, block: slice) -> None:
        """Store the gradient of a block's queries, add those of S and z."""
        x, space = query_rows(self.inputs.query, block, self.space), self.space
        phi_q = write_powers(powers, x, "queries", space)
        rows = saved_rows(self._saved, block, phi_q, space)
        grad = self._pull_rows(rows, phi_q).mul_(phi_q).view(*x.shape[:-1], -1)
        # out does not change with a factor common to all features of a row, den does.
        total = (rows.grad_den * rows.den).unsqueeze(-1)
        store_queries(self._query[..., block, :], powers.vjp(x, grad, total))

    def _pull(self, stretch: list[slice]) -> None:
        """The same for a stretch of any queries."""
        m, exponential, space = self.inputs.m, self.feature_map.exponential, self.space
        for block in stretch:
            x = query_rows(self.inputs.query, block, space)
            rows = saved_rows(self._saved, block, query_block(self.feature_map, x, space), space)
            phi_q = normalised_query_features(rows.t, m, rows.reference, exponential, over=True)
            grad_phi = self._pull_rows(rows, phi_q.flatten(0, 1)).view(phi_q.shape)
            grad_t = query_gradient(grad_phi, phi_q, m, rows.reference, exponential)
            self._back.query(x, grad_t, partial(store_queries, self._query[..., block, :]))

    def _pull_rows(self, rows: SavedRows, phi_q: Tensor) -> Tensor:
        """The gradient of features (B·H, G·n, R); those of S and z are added."""
        grad_num, grad_den = rows.gradients(lambda: (phi_q @ self.S, times_z(phi_q, self.z)), self.space)
        add_product_(self._grad_S.flatten(0, 1), phi_q, grad_num)
        self._grad_z.add_(torch.bmm(grad_den.mT, phi_q).view(self._grad_z.shape))
        # grad φ(q) = [grad num, grad den] [S, z]ᵀ.
        return self.space.product("grad", grad_num, self.S.mT).addcmul_(grad_den, self.z.unsqueeze(-2))
