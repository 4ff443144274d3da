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
from linattn.attention.backends.blocked.features import (
    MapGradients,
    normalised_query_features,
    query_block,
    query_features,
    query_gradient,
    query_rows,
    store_queries,
)
from linattn.attention.backends.blocked.grouped_reading import TileGradients, TileReader
from linattn.attention.backends.blocked.records import Gradients, Read, Saved
from linattn.attention.backends.blocked.rows import (
    empty_rows,
    saved_rows,
    store_rows,
    times_z,
    zeros_of,
)
from linattn.feature_maps import FeatureMap, GroupedFeatureMap


def read(feature_map: FeatureMap, inputs: Read) -> Rows:
    """The output (B, H, G, L, Dv) in the query's dtype, the denominator and its exponent (B, H, G, L)."""
    if isinstance(feature_map, GroupedFeatureMap):
        return TileReader(feature_map, inputs).rows()
    space, rows = Workspace(inputs.S), empty_rows(inputs.query, inputs.S)
    S, z = inputs.S.flatten(0, 1), inputs.z.flatten(0, 1)
    for block in blocks(inputs.query, feature_map.num_features):
        t = query_block(feature_map, query_rows(inputs.query, block, space), space)
        shaped_q, reference = query_features(t, inputs.m, feature_map.exponential, over=True)
        phi_q = shaped_q.flatten(0, 1)
        store_rows(rows, block, space.product("num", phi_q, S), times_z(phi_q, z), reference)
    return rows


def read_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (query, S, z)."""
    if isinstance(feature_map, GroupedFeatureMap):
        return TileGradients(feature_map, saved).gradients()
    inputs: Read = saved.inputs
    (query, S, z, m), exponential = inputs, feature_map.exponential
    space, back, flat_S, flat_z = (
        Workspace(S),
        MapGradients(feature_map, saved.tensors),
        S.flatten(0, 1),
        z.flatten(0, 1),
    )
    of_query, of_S, of_z = query.new_empty(query.shape), by_columns(zeros_of(S)), zeros_of(z)
    for block in blocks(query, feature_map.num_features):
        x = query_rows(query, block, space)
        rows = saved_rows(saved, block, query_block(feature_map, x, space), space)
        shaped_q = normalised_query_features(rows.t, m, rows.reference, exponential, over=True)
        phi_q = shaped_q.flatten(0, 1)
        grad_num, grad_den = rows.gradients(partial(_sums, phi_q, flat_S, flat_z), space)
        add_product_(of_S.flatten(0, 1), phi_q, grad_num)
        of_z.add_(torch.bmm(grad_den.mT, phi_q).view(of_z.shape))
        # grad φ(q) = [grad num, grad den] [S, z]ᵀ.
        grad_phi = space.product("grad", grad_num, flat_S.mT).addcmul_(grad_den, flat_z.unsqueeze(-2))
        grad_t = query_gradient(grad_phi.view(shaped_q.shape), shaped_q, m, rows.reference, exponential)
        back.query(x, grad_t, partial(store_queries, of_query[..., block, :]))
    return Gradients((of_query, of_S.contiguous(), of_z), None, back.finish())


def _sums(phi_q: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Num and den of features."""
    return phi_q @ S, times_z(phi_q, z)
