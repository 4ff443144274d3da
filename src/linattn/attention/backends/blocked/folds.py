"""The folds of this backend: one pass over keys, S += φ(k)vᵀ and z += Σ φ(k), one over queries, out = φ(q)ᵀS / φ(q)ᵀz,
block by block and back, and the causal one.

A part of the queries is a block of tokens, or where a grouped map reads a chunk of tiles (grouped.py). Letters
as in blocked/__init__.py.
"""

from functools import partial

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked import causal, features, records
from linattn.attention.backends.blocked.blocks import Running, Workspace, add_product_, blocks, by_columns
from linattn.attention.backends.blocked.fold import Fold
from linattn.attention.backends.blocked.grouped import TileGradients, TileReader
from linattn.attention.backends.blocked.records import Absorb, Causal, CausalOutputs, Gradients, Read, Saved
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.feature_maps.map_gradients import MapGradients


def absorb(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    state, space = Running(records.sums_of(inputs)), Workspace(inputs.S)
    keys = features.KeyBlocks(feature_map, inputs, space)
    for block in blocks(inputs.key, feature_map.num_features):
        here = keys.features(block, state.m)
        # The sums move to the new maximum first, so that the features' exponents are at most 0.
        state.rescale(here.peak(state.m))
        state.fold_in(here.turned_relative_to(state.m), keys.values(block), here.total)
    return state.sums()


def absorb_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (key, value, S, z); features are recomputed relative to the final m."""
    inputs, m, (grad_S, grad_z, _) = saved.inputs, saved.outputs.m, saved.grads
    space, back = Workspace(m), MapGradients(feature_map, saved.tensors)
    keys = features.KeyBlocks(feature_map, inputs, space)
    of_bias = features.BiasGradient(inputs.bias, inputs.key.shape[1], wanted=saved.bias_grad)
    of_key, of_value = (x.new_empty(x.shape) for x in (inputs.key, inputs.value))
    flat_grad_S, row_grad_z = grad_S.flatten(0, 1), grad_z.unsqueeze(-2)
    for block in blocks(inputs.key, feature_map.num_features):
        x, v, masked = keys.tokens(block), keys.values(block), keys.masked(block)
        here = keys.features(block, m, x)
        phi_k = here.turned_relative_to(m)
        # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
        grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
        grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
        features.store(of_value[:, :, block], masked, grad_v.view(v.shape))
        of_outputs = here.gradients(m, phi_k, grad_phi)
        of_bias.store(block, masked, of_outputs.log)
        back.key(x, of_outputs, partial(features.store, of_key[:, :, block], masked))
    decay = per_feature((inputs.m - m).exp_(), grad_z.shape[-1])
    return Gradients((of_key, of_value, grad_S * decay.unsqueeze(-1), grad_z * decay), of_bias.total, back.finish())


def read(feature_map: FeatureMap, inputs: Read) -> Rows:
    """The output (B, H, G, L, Dv) in the query's dtype, the denominator and its exponent (B, H, G, L)."""
    if isinstance(feature_map, GroupedFeatureMap):
        return TileReader(feature_map, inputs).rows()
    space, rows = Workspace(inputs.S), records.empty_rows(inputs.query, inputs.S)
    S, z, base = inputs.S.flatten(0, 1), inputs.z.flatten(0, 1), features.Base.of(inputs.m)
    for block in blocks(inputs.query, feature_map.num_features):
        x = features.query_rows(inputs.query, block, space)
        sums = partial(_sums, S=S, z=z, space=space)
        records.store_rows(rows, block, *features.read_queries(feature_map, x, base, space, sums))
    return rows


def read_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (query, S, z)."""
    if isinstance(feature_map, GroupedFeatureMap):
        return TileGradients(feature_map, saved).gradients()
    inputs: Read = saved.inputs
    (query, S, z, m), exponential = inputs, feature_map.exponential
    space, back = Workspace(S), MapGradients(feature_map, saved.tensors)
    flat_S, flat_z = S.flatten(0, 1), z.flatten(0, 1)
    of_query, of_S, of_z = query.new_empty(query.shape), by_columns(S.new_zeros(S.shape)), z.new_zeros(z.shape)
    base = features.Base.of(m)
    for block in blocks(query, feature_map.num_features):
        x = features.query_rows(query, block, space)
        rows = records.saved_rows(saved, block, x, space)
        shaped_q = features.repeated_query_features(feature_map, x, base, rows.reference, space)
        phi_q = shaped_q.flatten(0, 1)
        grad_num, grad_den = rows.gradients(partial(_sums, phi_q, flat_S, flat_z, space), space)
        add_product_(of_S.flatten(0, 1), phi_q, grad_num)
        of_z.add_(torch.bmm(grad_den.mT, phi_q).view(of_z.shape))
        # grad φ(q) = [grad num, grad den] [S, z]ᵀ.
        grad_phi = space.product("grad", grad_num, flat_S.mT).addcmul_(grad_den, flat_z.unsqueeze(-2))
        grad_t = features.query_gradient(grad_phi.view(shaped_q.shape), shaped_q, m, rows.reference, exponential)
        back.query(x, grad_t, partial(features.store, of_query[..., block, :], None))
    return Gradients((of_query, of_S.contiguous(), of_z), None, back.finish())


def _sums(phi_q: Tensor, S: Tensor, z: Tensor, space: Workspace) -> tuple[Tensor, Tensor]:
    """Num and den of features."""
    return space.product("num", phi_q, S), records.times_z(phi_q, z)


ABSORB = Fold(f"{__name__}:ABSORB", absorb, absorb_backward, Absorb, Sums, lambda keys, _: records.empty_sums(keys))
READ = Fold(f"{__name__}:READ", read, read_backward, Read, Rows, lambda x, _: records.empty_rows(x.query, x.S))
CAUSAL = Fold(f"{__name__}:CAUSAL", causal.forward, causal.backward, Causal, CausalOutputs, causal.empty_outputs)
