"""The mass of a key's column in the attention matrix: how much all queries together attend to it.

mass_j = Σ_i a_ij, a_ij = φ(q_i)·φ(k_j) / φ(q_i)ᵀz: the queries' features over their denominators are summed first, so
that two passes over the tokens give all masses. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Workspace, block_size, blocks, columns
from linattn.attention.backends.blocked.features import key_block, query_block, query_features
from linattn.attention.backends.blocked.grouped_reading import flat_groups, groups_of, part_width, tiles
from linattn.attention.backends.blocked.reading import times_z
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap, GroupedFeatureMap


def forward(
    feature_map: FeatureMap,
    bias: Tensor | None,  # (B, H or 1, Lk)
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    *sums: Tensor,  # S (B, H, R, Dv), z (B, H, R), m (B, H, M) of these keys
) -> tuple[Tensor]:
    """The masses (B, H, Lk), summed over a key head's queries; 0 for masked keys."""
    state = Sums(*sums)
    if isinstance(feature_map, GroupedFeatureMap):
        total = _grouped_queries(feature_map, query, state)
    else:
        total = _queries(feature_map, query, state)
    batch, heads, length, _ = key.shape
    mass, space = state.z.new_empty(batch, heads, length), Workspace(state.z)
    size = block_size(batch * heads, feature_map.num_features, key.device, is_causal=False)
    for start, stop in blocks(length, size):
        part = columns(bias, start, stop)
        x = space.rows("x", key[:, :, start:stop], part)
        keys = key_block(feature_map, x, part, space.buffer("keys", *x.shape[:-1], feature_map.num_features))
        phi_k = keys.turned_relative_to(state.m)
        mass[:, :, start:stop] = torch.matmul(phi_k, total.unsqueeze(-1)).squeeze(-1)
    return (mass,)


def _queries(feature_map: FeatureMap, query: Tensor, state: Sums) -> Tensor:
    """Σ_i φ(q_i) / φ(q_i)ᵀz, (B, H, R)."""
    batch, heads, groups, length, _ = query.shape
    total, space, z = torch.zeros_like(state.z), Workspace(state.z), state.z.flatten(0, 1)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=False)
    for start, stop in blocks(length, size):
        x = space.rows("x", query[..., start:stop, :]).flatten(2, 3)
        t = query_block(feature_map, x, space)
        phi_q = query_features(t, state.m, feature_map.exponential, over=True)[0].flatten(0, 1)
        den = times_z(phi_q, z)
        total += torch.bmm(den.masked_fill(den == 0, torch.inf).reciprocal_().mT, phi_q).view(total.shape)
    return total


def _grouped_queries(feature_map: GroupedFeatureMap, query: Tensor, state: Sums) -> Tensor:
    """The same, each query's in its own group."""
    rows, flat = query.flatten(2, 3), flat_groups(feature_map, *state)
    cut = tiles(groups_of(feature_map, rows, state.z.dtype), feature_map.num_groups)
    rows, total = rows.reshape(-1, rows.shape[-1]), torch.zeros_like(flat.z).squeeze(1)
    for part in cut.chunks(flat.S.shape[1:].numel() + part_width(cut, feature_map)):
        x, z = part.pick(rows).to(total.dtype), flat.z.index_select(0, part.group)
        phi_q, _ = feature_map.local_query(x, flat.places.index_select(0, part.group), z)
        den = feature_map.normalizer(phi_q, z)
        den = den.masked_fill((den == 0) | part.free, torch.inf)
        total.index_add_(0, part.group, (phi_q / den.unsqueeze(-1)).sum(1))
    return total.view(state.z.shape)
