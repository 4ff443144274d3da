"""Weights of a torch.nn.MultiheadAttention in this room's words; parts that no layer here has are refused."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Projections(NamedTuple):
    """Weights and biases of the four projections."""

    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor, Tensor] | None


def multihead_projections(mha: nn.MultiheadAttention, *, batch_first: bool | None) -> Projections:
    """The layer's projections of queries, keys, values and outputs."""
    if not isinstance(mha, nn.MultiheadAttention):
        raise TypeError(f"mha must be a torch.nn.MultiheadAttention, got {type(mha).__name__}")
    _check_representable(mha)
    if not (mha.batch_first or batch_first):
        raise ValueError(
            "mha takes (L, B, E), this layer (B, L, E); say batch_first=True, and transpose what you give the layer"
        )
    joint, joint_bias = (mha._parameters[name] for name in ("in_proj_weight", "in_proj_bias"))
    if joint is not None:
        query, key, value = joint.chunk(3)
    else:
        query, key, value = mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight
    weights = (query, key, value, mha.out_proj.weight)
    if joint_bias is None:
        return Projections(weights, None)
    query, key, value = joint_bias.chunk(3)
    return Projections(weights, (query, key, value, mha.out_proj.bias))


def fill_(layers: tuple[nn.Linear, ...], projections: Projections) -> None:
    """Copy them into linear layers, which take the weights' shapes."""
    with torch.no_grad():
        for place, layer in enumerate(layers):
            layer.weight = nn.Parameter(projections.weights[place].detach().clone())
            layer.out_features, layer.in_features = layer.weight.shape
            if projections.biases is not None:
                layer.bias = nn.Parameter(projections.biases[place].detach().clone())


def _check_representable(mha: nn.MultiheadAttention) -> None:
    """Refuse what these layers do not have."""
    if mha.kdim != mha.vdim:
        raise ValueError(
            f"keys and values are projections of one memory here, got kdim={mha.kdim} and vdim={mha.vdim}; "
            "project one of them to the other's width first"
        )
    if mha.bias_k is not None or mha.bias_v is not None:
        raise ValueError(
            "this layer has no learned key beside the tokens, got add_bias_kv=True; append it to the memory"
        )
    if mha.add_zero_attn:
        raise ValueError("this layer has no zero key beside the tokens, got add_zero_attn=True; train without it first")
    if mha.dropout:
        raise ValueError(
            f"linear attention has no weights to drop, got dropout={mha.dropout}; set mha.dropout = 0.0 to go without"
        )
