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
from linattn.attention.backends.blocked.bounded import (
    bounded_keys,
    bounded_powers,
    by_head,
    common_exponent,
    fits_denominators,
    fits_rows,
    fits_sums,
    parts,
    stretches,
    whole,
    write_powers,
)
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
from linattn.feature_maps._powers import Powers


class KeyPass:
    """Blocks of keys folded into sums: bounded where they are (bounded.py), else relative to running maxima."""

    def __init__(self, feature_map: FeatureMap, inputs: Absorb) -> None:
        self.state, self.space = Running(sums_of(inputs)), Workspace(inputs.S)
        self.keys = KeyBlocks(feature_map, inputs, self.space)
        self.powers = bounded_powers(feature_map, inputs.key, inputs.S)
        self.cut = blocks(inputs.key, feature_map.num_features)

    def sums(self) -> Sums:
        """Those after all keys, in memory of their own."""
        for stretch in stretches(self.cut):
            if self.powers is None:
                self._fold(stretch)
            else:
                self._fold_by_head(self.powers, stretch)
        return self.state.sums()

    def _fold_by_head(self, powers: Powers, stretch: list[slice]) -> None:
        """A stretch, bounded in the heads where that holds."""
        keys = bounded_keys(powers, self.keys, whole(stretch), self.state.m, self.space)
        sums = self.state.own()

        def bounded() -> Tensor:
            self.state.rescale(keys.c.unsqueeze(-1).expand(sums.m.shape))
            for block, part in zip(stretch, parts(keys.weight, stretch), strict=True):
                phi = write_powers(powers, self.keys.tokens(block), "keys", self.space)
                self.state.fold_in_weighted(phi, part, self.keys.values(block), self.space)
            return fits_sums(*self.state.views()[:2])

        by_head(keys.fits, bounded, lambda: self._fold(stretch), sums, ())

    def _fold(self, stretch: list[slice]) -> None:
        """A stretch relative to running maxima."""
        for block in stretch:
            found = self.keys.features(block)
            # The sums move to the new maximum first, so that the features' exponents are at most 0.
            self.state.rescale(found.peak(self.state.m))
            self.state.fold_in(found.turned_relative_to(self.state.m), self.keys.values(block))


def absorb(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    return KeyPass(feature_map, inputs).sums()


def absorb_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (key, value, S, z); features are recomputed relative to the final m."""
    return KeyPassGradients(feature_map, saved).gradients()


class KeyPassGradients:
    """The gradients of what blocks of keys were folded into, stretch by stretch as `KeyPass`."""

    def __init__(self, feature_map: FeatureMap, saved: Saved) -> None:
        inputs: Absorb = saved.inputs
        self._inputs, self._m, self.space = inputs, saved.outputs.m, Workspace(inputs.m)
        self.keys = KeyBlocks(feature_map, inputs, self.space)
        self.powers = bounded_powers(feature_map, inputs.key, inputs.S)
        self.cut = blocks(inputs.key, feature_map.num_features)
        self._back = MapGradients(feature_map, saved.tensors)
        self.of_bias = BiasGradient(inputs.bias, inputs.key.shape[1], wanted=saved.bias_grad)
        self._grad_S, self._grad_z, _ = saved.grads
        self._grad_key, self._grad_value = (x.new_empty(x.shape) for x in (inputs.key, inputs.value))

    def gradients(self) -> Gradients:
        """Those of all inputs."""
        for stretch in stretches(self.cut):
            if self.powers is None:
                self._pull(stretch)
            else:
                self._pull_by_head(self.powers, stretch)
        decay = per_feature((self._inputs.m - self._m).exp_(), self._grad_z.shape[-1])
        of_sums = self._grad_S * decay.unsqueeze(-1), self._grad_z * decay
        of_inputs = [self._grad_key, self._grad_value, *of_sums]
        return Gradients(of_inputs, self.of_bias.total, self._back.finish())

    def _pull_by_head(self, powers: Powers, stretch: list[slice]) -> None:
        """A stretch, bounded in the heads where the final exponent is one of bounded keys."""
        keys, tokens = bounded_keys(powers, self.keys, whole(stretch), self._m, self.space), whole(stretch)
        fits = keys.fits & (keys.c == self._m[..., 0])

        def bounded() -> Tensor:
            for block, weight in zip(stretch, parts(keys.weight, stretch), strict=True):
                self._pull_bounded(powers, block, weight)
            return fits

        written = [x[:, :, tokens] for x in (self._grad_key, self._grad_value)]
        written += [] if self.of_bias.of_heads is None else [self.of_bias.of_heads[..., tokens]]
        by_head(fits, bounded, lambda: self._pull(stretch), (), written)

    def _pull_bounded(self, powers: Powers, block: slice, weight: Tensor) -> None:
        """Store the gradients of a block of keys with these weights (B, H, n)."""
        x, v, masked = self.keys.tokens(block), self.keys.values(block), self.keys.masked(block)
        u, space, flat_grad_S = weight.unsqueeze(-1), self.space, self._grad_S.flatten(0, 1)
        phi = write_powers(powers, x, "keys", space)
        # grad u·v = φ grad S and grad φ = u·[v, 1] [grad S, grad z]ᵀ.
        grad_weighted = space.product("grad_v", phi, flat_grad_S).view(v.shape)
        store_masked(self._grad_value[:, :, block], masked, grad_weighted.mul_(u))
        weighted = torch.mul(v, u, out=space.buffer("weighted", *v.shape)).flatten(0, 1)
        grad = space.product("grad", weighted, flat_grad_S.mT)
        grad.addcmul_(u.flatten(0, 1), self._grad_z.flatten(0, 1).unsqueeze(-2)).mul_(phi)
        grad = grad.view(*x.shape[:-1], -1)
        total = grad.sum(-1, keepdim=True)
        self.of_bias.store(block, masked, total.squeeze(-1))
        store_masked(self._grad_key[:, :, block], masked, powers.vjp(x, grad, total))

    def _pull(self, stretch: list[slice]) -> None:
        """Store the gradients of a stretch of any keys."""
        m, space = self._m, self.space
        flat_grad_S, row_grad_z = self._grad_S.flatten(0, 1), self._grad_z.unsqueeze(-2)
        for block in stretch:
            x, v, masked = self.keys.tokens(block), self.keys.values(block), self.keys.masked(block)
            found = self.keys.features(block, x)
            phi_k = found.turned_relative_to(m)
            # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
            grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
            grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
            store_masked(self._grad_value[:, :, block], masked, grad_v.view(v.shape))
            of_outputs = found.gradients(m, phi_k, grad_phi)
            self.of_bias.store(block, masked, of_outputs.log)
            self._back.key(x, of_outputs, partial(store_masked, self._grad_key[:, :, block], masked))


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
        for stretch in stretches(self.blocks):
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
        of_stretch = rows_of(rows, whole(stretch))
        reference, fits = self._bounded(powers, whole(stretch))

        def bounded() -> Tensor:
            for block, part in zip(stretch, parts(reference, stretch), strict=True):
                phi_q = write_powers(powers, query_rows(self.inputs.query, block, self.space), "queries", self.space)
                store_rows(rows, block, self.space.product("num", phi_q, self.S), times_z(phi_q, self.z), part)
            return fits_denominators(of_stretch.den)

        by_head(fits, bounded, lambda: self._store(rows, stretch), (), of_stretch)

    def _bounded(self, powers: Powers, tokens: slice) -> tuple[Tensor, Tensor]:
        """The exponents (B, H, G, n) of rows relative to one exponent, and the heads (B, H) where they are short."""
        term = powers.term(self.space.rows("q", self.inputs.query[..., tokens, :]))
        fits = self._fits & fits_rows(powers, term)
        return term.add_(self._c[..., None, None]), fits


class BlockGradients(BlockReader):
    """The gradients of what blocks read."""

    def __init__(self, feature_map: FeatureMap, saved: Saved) -> None:
        super().__init__(feature_map, saved.inputs)
        self._saved, self._back = saved, MapGradients(feature_map, saved.tensors)
        query, S, z, _ = self.inputs
        self._query, self._grad_S, self._grad_z = query.new_empty(query.shape), zeros_of(S), zeros_of(z)

    def gradients(self) -> Gradients:
        """Those of all inputs."""
        for stretch in stretches(self.blocks):
            if self.powers is None:
                self._pull(stretch)
            else:
                self._pull_by_head(self.powers, stretch)
        return Gradients((self._query, self._grad_S, self._grad_z), None, self._back.finish())

    def _pull_by_head(self, powers: Powers, stretch: list[slice]) -> None:
        """A stretch, bounded in the heads where the forward pass was."""
        tokens = whole(stretch)
        reference, fits = self._bounded(powers, tokens)
        fits = fits & (reference == self._saved.outputs.reference[..., tokens]).flatten(2).all(-1)

        def bounded() -> Tensor:
            for block in stretch:
                self._pull_bounded(powers, block)
            return fits

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
        self._grad_S.flatten(0, 1).baddbmm_(phi_q.mT, grad_num)
        self._grad_z.add_(torch.bmm(grad_den.mT, phi_q).view(self._grad_z.shape))
        # grad φ(q) = [grad num, grad den] [S, z]ᵀ.
        return self.space.product("grad", grad_num, self.S.mT).addcmul_(grad_den, self.z.unsqueeze(-2))


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


def rows_of(rows: Rows, block: slice) -> Rows:
    """Views of a block's rows."""
    return Rows(rows.out[..., block, :], rows.den[..., block], rows.reference[..., block])


def zeros_of(x: Tensor) -> Tensor:
    """Zeros of its shape, row by row in memory."""
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def store_rows(rows: Rows, block: slice, num: Tensor, total: Tensor, reference: Tensor) -> None:
    """Write a block's num/total, total and exponents; a row that saw no key (total = 0) gives 0."""
    out, den, exponent = rows_of(rows, block)
    den.copy_(total.reshape(den.shape))
    total = total.masked_fill(total == 0, torch.inf).reshape(*den.shape, 1)
    if out.dtype == num.dtype:
        torch.div(num.view(out.shape), total, out=out)
    else:
        out.copy_(num.view(out.shape).div_(total))
    exponent.copy_(reference.reshape(den.shape))


def times_z(phi_q: Tensor, z: Tensor) -> Tensor:
    """φ(q)·z, (B·H, n, 1); this way round it is a product of a row and a matrix, which runs several times as fast."""
    return torch.bmm(z.unsqueeze(-2), phi_q.mT).mT
