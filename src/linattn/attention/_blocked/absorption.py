"""Fold keys and values into a state, block by block: S += φ(k)vᵀ, z += φ(k); letters as in blocks.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.attention._blocked.blocks import (
    Keys,
    Workspace,
    as_keys,
    block_size,
    blocks,
    joined,
    key_block,
    key_outputs,
    new_totals,
    parted,
    pulled_back,
    traced,
)
from linattn.feature_maps import FeatureMap


def rescale(S: Tensor, z: Tensor, m: Tensor, c: Tensor) -> None:
    """S and z, heads flattened, times exp(m - c), in place: the same state relative to another exponent (B, H, M)."""
    decay = (m - c).exp_().unsqueeze(-1).flatten(0, 1)
    S.mul_(decay)
    z.mul_(decay)


def fold_in(S: Tensor, z: Tensor, phi_k: Tensor, value: Tensor) -> None:
    """S <- S + φ(k)ᵀv and z <- z + Σ φ(k), in place; heads flattened, all relative to the same exponent."""
    S.baddbmm_(phi_k.mT, value)
    z.add_(phi_k.sum(-2).unsqueeze(-1))


def forward(
    feature_map: FeatureMap,
    mask: Tensor | None,  # (B, L)
    key: Tensor,  # (B, H, L, D)
    value: Tensor,  # (B, H, L, Dv)
    moments: Tensor,  # (B, H, R, E)
    m: Tensor,  # (B, H, M)
) -> tuple[Tensor, Tensor]:
    """The moments and running maximum after these keys; the given ones are not written."""
    (S, z), space = parted(moments), Workspace(moments)
    size = block_size(key.shape[0] * key.shape[1], feature_map.num_features, key.device, is_causal=False)
    for start, stop in blocks(key.shape[2], size):
        part = None if mask is None else mask[:, start:stop]
        keys = key_block(feature_map, space.rows("x", key[:, :, start:stop], part), part, space)
        c = keys.peak(m)
        rescale(S, z, m, c)
        phi_k = keys.turned_relative_to(c).flatten(0, 1)
        fold_in(S, z, phi_k, space.rows("v", value[:, :, start:stop], part).flatten(0, 1))
        m = c
    return joined(S, z, moments), m.clone()


def backward(
    feature_map: FeatureMap,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of (key, value, moments) and of the map's tensors; features are recomputed relative to the final m."""
    (grad_moments, _), (key, value, _, m_before), (_, m) = grads, inputs, outputs
    grad_S, grad_z, space = grad_moments[..., :-1].contiguous(), grad_moments[..., -1:], Workspace(m)
    grad_key, grad_value, totals = key.new_empty(key.shape), value.new_empty(value.shape), new_totals(tensors)
    size = block_size(key.shape[0] * key.shape[1], feature_map.num_features, key.device, is_causal=False)
    for start, stop in blocks(key.shape[2], size):
        part = None if mask is None else mask[:, start:stop]
        x = space.rows("x", key[:, :, start:stop], part)
        leaf, results = traced(lambda x: key_outputs(feature_map, x), x)
        keys = as_keys([result.detach() for result in results], feature_map, part)
        shape = (*x.shape[:-1], feature_map.num_features)
        phi_k, v = keys.relative_to(m, space.buffer("phi", *shape)), space.rows("v", value[:, :, start:stop], part)
        # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
        grad_phi = torch.matmul(v, grad_S.mT, out=space.buffer("grad", *shape)).add_(grad_z.mT)
        grad_outputs = key_gradients(keys, m, phi_k, grad_phi)[: len(results)]
        store_masked(grad_key[:, :, start:stop], pulled_back(leaf, results, grad_outputs, tensors, totals), part)
        store_masked(grad_value[:, :, start:stop], phi_k @ grad_S, part)
    return [grad_key, grad_value, grad_moments * (m_before - m).exp().unsqueeze(-1)], totals


def key_gradients(keys: Keys, c: Tensor, phi_k: Tensor, grad_phi: Tensor) -> tuple[Tensor, ...]:
    """From the gradient of φ(k)·exp(-c) to those of the map's outputs (weights last); c cancels and is a constant.

    An exponential map's gradient is written over `grad_phi`.
    """
    if keys.linear is None:
        return (grad_phi.mul_(phi_k),)
    if keys.log is None:
        return (grad_phi,)
    return grad_phi * (keys.log - c.unsqueeze(-2)).exp_(), (grad_phi * phi_k).sum(-1)


def store_masked(target: Tensor, grad: Tensor, mask: Tensor | None) -> None:
    """Write a block of gradients; masked keys get exactly 0."""
    target.copy_(grad if mask is None else torch.where(mask[:, None, :, None], grad, 0))
