"""Maps for the layers of a model, fitted to its attention on sample texts.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.convert.running import Batch, to_device
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf import AttentionCall, LayerReport, PreTrainedModel, calibrating, intercept
from linattn.methods.method import Method
from linattn.processes import Processes


def record(model: PreTrainedModel, batch: Batch) -> dict[str, AttentionCall]:
    """The attention calls of one forward pass by module name: `linattn.hf.capture` without its check."""
    calls: dict[str, AttentionCall] = {}

    def keep(call: AttentionCall) -> Tensor:
        """Keep the call, answer exactly."""
        calls[call.module_name] = call
        return call.softmax()

    with torch.no_grad(), intercept(model, keep):
        model(**to_device(batch, model.device))
    return calls


def build_maps(
    methods: Sequence[Method],
    layers: Sequence[LayerReport],
    calls: dict[str, AttentionCall],
    *,
    num_features: int | None,
    seed: int,
) -> list[FeatureMap]:
    """Every layer's map by its method, on its call's device, with trainable weights where it has any; not yet fitted.

    Layer n's map is drawn from seed + n; draws and weights are separate for each key/value head where the map has such.
    """
    maps = []
    for method, layer in zip(methods, layers, strict=True):
        call = calls[layer.module_name]
        width, heads = call.query.shape[-1], call.key.shape[1]
        drawn = {"scale": width**-0.5, "seed": seed + layer.layer, "num_heads": heads}
        feature_map = method.build_map(width, num_features=num_features, **drawn)
        maps.append(feature_map.to(call.query.device).requires_grad_(True))
    return maps


def fit_maps(
    maps: Sequence[FeatureMap],
    layers: Sequence[LayerReport],
    model: PreTrainedModel,
    batches: Sequence[Batch],
) -> None:
    """Fit every map that takes statistics, in place, to its layer's unpadded queries and keys over all batches.

    Of several processes each fits the maps of some layers, and all get the statistics of all.
    """
    named = zip(layers, maps, strict=True)
    fitted = {layer.module_name: feature_map for layer, feature_map in named if isinstance(feature_map, FittedMap)}
    processes, names = Processes.of_this_run(), list(fitted)
    if share := {name: fitted[name] for name in names[processes.rank :: processes.size]}:
        calibrating.fit_maps(model, share, batches)
    for name, state in zip(names, processes.each(names, lambda name: fitted[name].state_dict()), strict=True):
        if name not in share:
            fitted[name].load_state_dict(state)


def texts(call: AttentionCall) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each row of a batch, without its padding."""
    rows = []
    for row in range(len(call.query)):
        live = slice(None) if call.key_mask is None else call.key_mask[row]
        query = call.query[row : row + 1]
        # Queries of another text than the keys have no padding that is known of.
        if query.shape[2] == call.key.shape[2]:
            query = query[:, :, live]
        rows.append((query, call.key[row : row + 1, :, live], call.value[row : row + 1, :, live]))
    return rows
