"""Fold keys and values into a state, block by block: S += φ(k)vᵀ, z += Σ φ(k); letters as in blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from linattn.attention.backends.blocked.blocks import Running, Workspace, block_size, blocks, columns, is_masked
from linattn.attention.backends.blocked.features import BiasGradient, Gradients, MapGradients, key_block
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap


def forward(
    feature_map: FeatureMap,
    bias: Tensor | None,  # (B, H or 1, L)
    key: Tensor,  # (B, H, L, D)
    value: Tensor,  # (B, H, L, Dv)
    *before: Tensor,  # S (B, H, R, Dv), z (B, H, R), m (B, H, M)
) -> Sums:
    """S, z and the running maximum after these keys; the given ones are not written."""
    state, space = Running(Sums(*before)), Workspace(before[0])
    size = block_size(key.shape[0] * key.shape[1], feature_map.num_features, key.device, is_causal=False)
    for start, stop in blocks(key.shape[2], size):
        part = columns(bias, start, stop)
        x = space.rows("x", key[:, :, start:stop], part)
        keys = key_block(feature_map, x, part, space.buffer("keys", *x.shape[:-1], feature_map.num_features))
        state.rescale(keys.peak(state.m))
        v = space.rows("v", value[:, :, start:stop], part)
        state.fold_in(keys.turned_relative_to(state.m).flatten(0, 1), v.flatten(0, 1))
    return state.sums()


def backward(
    feature_map: FeatureMap,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    bias_grad: bool,
) -> Gradients:
    """Gradients of (key, value, S, z); features are recomputed relative to the final m."""
    (grad_S, grad_z, _), (key, value, *_, m_before), m = grads, inputs, outputs[2]
    flat_grad_S, row_grad_z = grad_S.flatten(0, 1), grad_z.unsqueeze(-2)
    space, back, of_bias = Workspace(m), MapGradients(feature_map, tensors), BiasGradient(bias, wanted=bias_grad)
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    size = block_size(key.shape[0] * key.shape[1], feature_map.num_features, key.device, is_causal=False)
    for start, stop in blocks(key.shape[2], size):
        part = columns(bias, start, stop)
        x, v = (space.rows(name, y[:, :, start:stop], part) for name, y in (("x", key), ("v", value)))
        keys = key_block(feature_map, x, part, space.buffer("keys", *x.shape[:-1], feature_map.num_features))
        phi_k = keys.turned_relative_to(m)
        # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
        grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
        grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
        store_masked(grad_value[:, :, start:stop], grad_v.view(v.shape), part)
        of_outputs = keys.gradients(m, phi_k, grad_phi)
        of_bias.store(start, stop, of_outputs)
        store_masked(grad_key[:, :, start:stop], back.key(x, of_outputs), part)
    decay = per_feature((m_before - m).exp_(), grad_z.shape[-1])
    of_inputs = [grad_key, grad_value, grad_S * decay.unsqueeze(-1), grad_z * decay]
    return Gradients(of_inputs, of_bias.total, back.totals)


def store_masked(target: Tensor, grad: Tensor, bias: Tensor | None) -> None:
    """Write a block of gradients; masked keys get exactly 0."""
    target.copy_(grad if bias is None else grad.masked_fill(is_masked(bias).unsqueeze(-1), 0))
