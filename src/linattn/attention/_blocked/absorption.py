"""Fold keys and values into a state, block by block: S += φ(k)vᵀ, z += Σ φ(k); letters as in _blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.attention._blocked.blocks import Moments, Running, Workspace, block_size, blocks, per_feature
from linattn.attention._blocked.features import WayBack, key_block
from linattn.feature_maps import FeatureMap


def forward(
    feature_map: FeatureMap,
    mask: Tensor | None,  # (B, H or 1, L)
    key: Tensor,  # (B, H, L, D)
    value: Tensor,  # (B, H, L, Dv)
    *before: Tensor,  # S (B, H, R, Dv), z (B, H, R), m (B, H, M)
) -> Moments:
    """S, z and the running maximum after these keys; the given ones are not written."""
    state, space = Running(Moments(*before)), Workspace(before[0])
    size = block_size(key.shape[0] * key.shape[1], feature_map.num_features, key.device, is_causal=False)
    for start, stop in blocks(key.shape[2], size):
        part = None if mask is None else mask[..., start:stop]
        x = space.rows("x", key[:, :, start:stop], part)
        keys = key_block(feature_map, x, part, space.buffer("keys", *x.shape[:-1], feature_map.num_features))
        state.rescale(keys.peak(state.m))
        v = space.rows("v", value[:, :, start:stop], part)
        state.fold_in(keys.turned_relative_to(state.m).flatten(0, 1), v.flatten(0, 1))
    return state.moments()


def backward(
    feature_map: FeatureMap,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of (key, value, S, z) and of the map's tensors; features are recomputed relative to the final m."""
    (grad_S, grad_z, _), (key, value, *_, m_before), m = grads, inputs, outputs[2]
    flat_grad_S, row_grad_z = grad_S.flatten(0, 1), grad_z.unsqueeze(-2)
    space, back = Workspace(m), WayBack(feature_map, tensors)
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    size = block_size(key.shape[0] * key.shape[1], feature_map.num_features, key.device, is_causal=False)
    for start, stop in blocks(key.shape[2], size):
        part = None if mask is None else mask[..., start:stop]
        x, v = (space.rows(name, y[:, :, start:stop], part) for name, y in (("x", key), ("v", value)))
        keys = key_block(feature_map, x, part, space.buffer("keys", *x.shape[:-1], feature_map.num_features))
        phi_k = keys.turned_relative_to(m)
        # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
        grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
        grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
        store_masked(grad_value[:, :, start:stop], grad_v.view(v.shape), part)
        store_masked(grad_key[:, :, start:stop], back.key(x, keys.gradients(m, phi_k, grad_phi)), part)
    decay = per_feature((m_before - m).exp_(), grad_z.shape[-1])
    return [grad_key, grad_value, grad_S * decay.unsqueeze(-1), grad_z * decay], back.totals


def store_masked(target: Tensor, grad: Tensor, mask: Tensor | None) -> None:
    """Write a block of gradients; masked keys get exactly 0."""
    target.copy_(grad if mask is None else torch.where(mask.unsqueeze(-1), grad, 0))
