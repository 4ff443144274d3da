"""Maps as the kernels take them: exponents as powers W·x + b + a·|x|², or features made before them.

Letters as in linattn_triton, m rows of W.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from linattn.feature_maps import FeatureMap, LearnedExponential
from linattn.feature_maps.learned import Exponents
from linattn.feature_maps.powers import Powers
from linattn.softmax.precision import LOG2_E
from linattn_triton.kernels.blocks import NO_KEY, Shape, Side
from linattn_triton.objections import WIDEST

_PACKED: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Packed(NamedTuple):
    """Powers of one side in units of log 2, by tiles."""

    weights: Tensor  # (H or 1, tiles·F, padded D)
    bias: Tensor  # (H or 1, tiles·F)
    curvature: Tensor  # (H or 1, tiles·F)

    def side(self, m: Tensor | None = None) -> Side:
        """Side as kernels take it; of queries that read sums relative to m (B, H, R), with that in the bias."""
        bias = self.bias.unsqueeze(0)
        if m is not None:
            bias = bias + F.pad(m * LOG2_E, (0, bias.shape[-1] - m.shape[-1]))
        strides = (_stride(self.weights, 0), _stride(bias, 0), _stride(bias, 1), _stride(self.curvature, 0))
        return Side(self.weights, bias, self.curvature, *strides)


def kind_of(feature_map: FeatureMap, *, is_followed: bool) -> str:
    """Whether the kernels compute a map's features, from their powers, or are given exponents or features."""
    if not feature_map.exponential:
        return "features"
    if is_followed or feature_map.head_dim > WIDEST:
        return "exponents"
    is_power = isinstance(feature_map, LearnedExponential) or feature_map.powers(torch.float32) is not None
    return "powers" if is_power else "exponents"


def packed_sides(feature_map: FeatureMap, shape: Shape, like: Tensor) -> tuple[Packed, Packed]:
    """Sides of queries and keys; constants alone where features are given."""
    if shape.kind != "powers":
        nothing = like.new_zeros(1, shape.num_features)
        packed = _packed(like.new_zeros(1, shape.num_features, 1), nothing, nothing, shape)
        return packed, packed
    if isinstance(feature_map, LearnedExponential):
        query, key = (_of_learned(x, shape) for x in (feature_map.of_query, feature_map.of_key))
        return query, key
    powers = feature_map.powers(torch.float32)
    assert powers is not None, f"{feature_map!r} has no powers"
    known = _PACKED.setdefault(powers.doubled, {})
    if shape not in known:
        with torch.inference_mode(False):
            known[shape] = _of_powers(powers, shape)
    return known[shape], known[shape]


def _of_powers(powers: Powers, shape: Shape) -> Packed:
    """Side of a map that takes its exponents apart."""
    weights = powers.doubled.mT if powers.doubled.dim() == 3 else powers.doubled.mT.unsqueeze(0)
    if powers.is_paired:
        weights = torch.cat((weights, -weights), -2)
    bias = weights.new_full(weights.shape[:-1], powers.constant * LOG2_E)
    if powers.constants is not None:
        bias = bias + powers.constants.squeeze(-2)
    return _packed(weights, bias, torch.full_like(bias, -powers.scale / 2 * LOG2_E), shape)


def _of_learned(exponents: Exponents, shape: Shape) -> Packed:
    """Side of trained exponents, frozen now."""
    assert exponents.curvature is not None, "the exponents of LearnedExponential have a curvature"
    weights, bias, curvature = (
        (x.detach() if x.dim() == rank else x.detach().unsqueeze(0)) * LOG2_E
        for x, rank in ((exponents.weight, 3), (exponents.bias, 2), (exponents.curvature, 2))
    )
    return _packed(weights * exponents.scale**0.5, bias, curvature * (-exponents.scale / 2), shape)


def _packed(weights: Tensor, bias: Tensor, curvature: Tensor, shape: Shape) -> Packed:
    """Filled to whole tiles, with features that are 0."""
    empty = shape.total - shape.num_features
    weights = F.pad(weights, (0, shape.padded_d - weights.shape[-1], 0, empty)).contiguous()
    if not shape.emulated and shape.operand.name == "bf16":
        weights = weights.to(torch.bfloat16)
    bias = F.pad(bias, (0, empty), value=NO_KEY.value)
    return Packed(weights, bias.contiguous(), F.pad(curvature, (0, empty)).contiguous())


def _stride(x: Tensor, dim: int) -> int:
    """Stride of a dimension, 0 where it has one element for all."""
    return 0 if x.shape[dim] == 1 else x.stride(dim)
