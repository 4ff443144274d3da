"""The feature map's tensors that a call must hand to its backend: those with gradients, and those of the call."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention._blocked.fold import outside_autocast
from linattn.feature_maps import FeatureMap
from linattn.feature_maps._swapping import named_tensors


def own_tensors(
    feature_map: FeatureMap,
    query: Tensor,  # (B, H, Lq, D)
    key: Tensor,  # (B, Hkv, Lk, D)
    key_mask: Tensor | None,
    *,
    is_causal: bool,
) -> dict[str, Tensor]:
    """By name; everything else of the map is a constant that folds may read from the map itself."""
    with outside_autocast(query.device):
        call = feature_map.call_tensors(query, key, key_mask=key_mask, is_causal=is_causal)
    return {name: tensor for name, tensor in named_tensors(feature_map) if _varies(tensor)} | dict(call)


def _varies(tensor: Tensor) -> bool:
    """Whether autograd or a torch.func transform follows this tensor; a Function must get those as arguments."""
    if tensor.requires_grad or torch.compiler.is_compiling():
        return tensor.requires_grad
    # torch has no public name for this.
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
