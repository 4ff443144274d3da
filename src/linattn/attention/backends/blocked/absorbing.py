"""One pass over keys, S += φ(k)vᵀ and z += Σ φ(k), block by block, and back. Letters as in blocked/__init__.py."""

from __future__ import annotations

from functools import partial

from linattn.attention.backends.blocked.blocks import Running, Workspace, blocks
from linattn.attention.backends.blocked.features import (
    BiasGradient,
    KeyBlocks,
    MapGradients,
    store_masked,
)
from linattn.attention.backends.blocked.records import Absorb, Gradients, Saved, sums_of
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap


def absorb(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    state, space = Running(sums_of(inputs)), Workspace(inputs.S)
    keys = KeyBlocks(feature_map, inputs, space)
    for block in blocks(inputs.key, feature_map.num_features):
        features = keys.features(block)
        # The sums move to the new maximum first, so that the features' exponents are at most 0.
        state.rescale(features.peak(state.m))
        state.fold_in(features.turned_relative_to(state.m), keys.values(block))
    return state.sums()


def absorb_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (key, value, S, z); features are recomputed relative to the final m."""
    inputs, m, (grad_S, grad_z, _) = saved.inputs, saved.outputs.m, saved.grads
    space, back = Workspace(m), MapGradients(feature_map, saved.tensors)
    keys = KeyBlocks(feature_map, inputs, space)
    of_bias = BiasGradient(inputs.bias, inputs.key.shape[1], wanted=saved.bias_grad)
    of_key, of_value = (x.new_empty(x.shape) for x in (inputs.key, inputs.value))
    flat_grad_S, row_grad_z = grad_S.flatten(0, 1), grad_z.unsqueeze(-2)
    for block in blocks(inputs.key, feature_map.num_features):
        x, v, masked = keys.tokens(block), keys.values(block), keys.masked(block)
        features = keys.features(block, x)
        phi_k = features.turned_relative_to(m)
        # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
        grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
        grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
        store_masked(of_value[:, :, block], masked, grad_v.view(v.shape))
        of_outputs = features.gradients(m, phi_k, grad_phi)
        of_bias.store(block, masked, of_outputs.log)
        back.key(x, of_outputs, partial(store_masked, of_key[:, :, block], masked))
    decay = per_feature((inputs.m - m).exp_(), grad_z.shape[-1])
    return Gradients((of_key, of_value, grad_S * decay.unsqueeze(-1), grad_z * decay), of_bias.total, back.finish())
