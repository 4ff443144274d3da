"""Fold keys and values into sums, block by block: S += φ(k)vᵀ, z += Σ φ(k); letters as in blocked/__init__.py."""

from __future__ import annotations

from linattn.attention.backends.blocked.blocks import Running, Workspace, blocks
from linattn.attention.backends.blocked.features import BiasGradient, KeyBlocks, MapGradients, store_masked
from linattn.attention.backends.blocked.records import Absorb, Gradients, Saved, sums_of
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap


def forward(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    state = Running(sums_of(inputs))
    keys = KeyBlocks(feature_map, inputs, Workspace(inputs.S))
    for block in blocks(inputs.key, feature_map.num_features):
        found = keys.features(block)
        # The sums move to the new maximum first, so that the features' exponents are at most 0.
        state.rescale(found.peak(state.m))
        state.fold_in(found.turned_relative_to(state.m), keys.values(block))
    return state.sums()


def backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (key, value, S, z); features are recomputed relative to the final m."""
    inputs: Absorb = saved.inputs
    m, (grad_S, grad_z, _), space = saved.outputs.m, saved.grads, Workspace(inputs.m)
    keys = KeyBlocks(feature_map, inputs, space)
    back, of_bias = MapGradients(feature_map, saved.tensors), BiasGradient(inputs.bias, wanted=saved.bias_grad)
    flat_grad_S, row_grad_z = grad_S.flatten(0, 1), grad_z.unsqueeze(-2)
    grad_key, grad_value = (x.new_empty(x.shape) for x in (inputs.key, inputs.value))
    for block in blocks(inputs.key, feature_map.num_features):
        x, v, bias = keys.tokens(block), keys.values(block), keys.bias(block)
        found = keys.features(block, x)
        phi_k = found.turned_relative_to(m)
        # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
        grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
        grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
        store_masked(grad_value[:, :, block], grad_v.view(v.shape), bias)
        of_outputs = found.gradients(m, phi_k, grad_phi)
        of_bias.store(block, of_outputs.log)
        store_masked(grad_key[:, :, block], back.key(x, of_outputs), bias)
    decay = per_feature((inputs.m - m).exp_(), grad_z.shape[-1])
    of_inputs = [grad_key, grad_value, grad_S * decay.unsqueeze(-1), grad_z * decay]
    return Gradients(of_inputs, of_bias.total, back.totals)
