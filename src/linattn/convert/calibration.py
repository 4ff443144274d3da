"""Maps for the layers of a model, fitted to the attention it pays to sample texts.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from linattn.convert.running import Batch, to_device
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf import AttentionCall, LayerReport, PreTrainedModel, calibrating, intercept
from linattn.hf.observing import live_tokens as unpadded
from linattn.planning.methods import Method


def record(model: PreTrainedModel, batch: Batch) -> dict[str, AttentionCall]:
    """The attention calls of one forward pass, by the name of their module.

    Like `linattn.hf.capture`, which checks a model once, without its second pass: for every step of a training.

    Cost: a forward pass.

    Args:
        model: the original model, which `capture` accepts.
        batch: its keyword arguments.

    Returns:
        One call per attention module.

    Example:
        See `linattn.hf.capture`.

    Source: `linattn.hf.intercept`.
    """
    calls: dict[str, AttentionCall] = {}

    def keep(call: AttentionCall) -> Tensor:
        """Keep the call, answer exactly."""
        calls[call.module_name] = call
        return call.softmax()

    with torch.no_grad(), intercept(model, keep):
        model(**to_device(batch, model.device))
    return calls


def build_maps(
    method: Method,
    layers: Iterable[LayerReport],
    calls: dict[str, AttentionCall],
    *,
    num_features: int | None,
    seed: int,
) -> list[FeatureMap]:
    """A map for every layer: drawn where it is random, untrained where it learns, not yet fitted.

    Maps with a set of weights or a draw of their own for each key/value head have one.

    Cost: the constructors.

    Args:
        method: whose map it is.
        layers: the layers to convert.
        calls: one recorded call per layer, for its sizes.
        num_features: R, for a map whose width is free and not written.
        seed: layer n's map is drawn from seed + n.

    Returns:
        The maps, in order, on the calls' device, with trainable weights where they have any.

    Raises:
        ValueError: if the map cannot be built.

    Example:
        See `linattn.convert.convert_`.

    Source: `linattn.planning.methods`.
    """
    found = []
    for layer in layers:
        call = calls[layer.module_name]
        width, heads = call.query.shape[-1], call.key.shape[1]
        feature_map = method.build(
            width, num_features=num_features, scale=width**-0.5, seed=seed + layer.layer, num_heads=heads
        )
        found.append(feature_map.to(call.query.device).requires_grad_(True))
    return found


def fit_maps(
    maps: Sequence[FeatureMap], layers: Sequence[LayerReport], model: PreTrainedModel, batches: Sequence[Batch]
) -> None:
    """Fit every map that takes statistics to its layer's queries and keys over all batches together.

    Cost: a forward pass per batch, memory for at most 16384 tokens of each layer, and the fits.

    Args:
        maps: changed in place.
        layers: theirs.
        model: the original model.
        batches: sample texts; padded tokens are left out.

    Example:
        See `linattn.convert.convert_`.

    Source: the `fit` of each map.
    """
    fitted = {
        layer.module_name: feature_map
        for layer, feature_map in zip(layers, maps, strict=True)
        if isinstance(feature_map, FittedMap)
    }
    if fitted:
        calibrating.fit_maps(model, fitted, batches)


def live_tokens(x: Tensor, call: AttentionCall) -> Tensor:
    """The unpadded tokens of all samples in a row: (B, H, L, D) -> (1, H, N, D)."""
    return unpadded(x, call.key_mask)
