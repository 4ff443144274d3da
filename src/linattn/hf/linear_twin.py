"""The plain linear model that a linearized softmax `LinearLMForCausalLM` is: same class, a pattern of "l".

Letters: Hkv key/value heads, D head width.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf._attention_modules import attention_modules
from linattn.hf.language_model import LinearLMForCausalLM
from linattn.hf.language_model_config import LinearLMConfig, taking_any_map
from linattn.hf.layer_attention import ATTRIBUTE, LayerAttention, attention_of
from linattn.methods.map_records import written
from linattn.methods.method import Method
from linattn.nn import LinearAttention
from linattn.positions import Position, Rotary
from linattn.positions.encodings import keeps_rotations

_LINEARIZE = "linearize_ it by one feature_map for all layers"


def check_twin(model: LinearLMForCausalLM, methods: Sequence[Method]) -> None:
    """Refuse, before any work, a model or methods of which no plain linear model would come."""
    first, *others = dict.fromkeys(methods)
    if others:
        labels = ", ".join(method.label for method in (first, *others))
        raise ValueError(f"all linear blocks of a LinearLM share one method, got {labels}; name one method")
    _check_model(model)
    if first.map is not None and "scale" in dict(first.map.options):
        raise ValueError(
            f"{first.label}: a LinearLM's maps have the scale D**-0.5 of its softmax; leave scale out of the method"
        )


def linear_twin(model: LinearLMForCausalLM, state: Mapping[str, Tensor] | None = None) -> LinearLMForCausalLM:
    """The model whose blocks are linear where `linearize_` replaced the softmax: its outputs, to the bit.

        config: pattern "l" in their places, method the map's written form;   weights: the model's

    Rotary positions admit any map there, as linearize_ does. `state` is in the place of the model's `state_dict`.
    Cost: a copy of the weights.

    Raises ValueError if the layers attend by maps of several forms or of another scale than the softmax's, or
    by ones of another number of heads; or if the model has linear blocks of its own, or a gate.
    """
    _check_model(model)
    attentions = {
        part.name: attention
        for part in attention_modules(model)
        if (attention := attention_of(part.module)) is not None
    }
    settings = _settings(model, attentions)
    # Building draws weights, which are overwritten; the caller's draws are to go on as if nothing had been built.
    with torch.random.fork_rng(devices=[]):
        twin = LinearLMForCausalLM(LinearLMConfig.from_dict(settings))
    nn.Module.to(twin, device=model.device, dtype=model.dtype)
    inner = f".{ATTRIBUTE}."
    weights = model.state_dict() if state is None else state
    twin.load_state_dict({name.replace(inner, "."): x for name, x in weights.items()})
    twin.generation_config = copy.deepcopy(model.generation_config)
    twin.train(model.training)
    return twin


def _check_model(model: LinearLMForCausalLM) -> None:
    """Refuse what a plain linear model does not have, or the interface cannot express."""
    blocks = model.model.blocks
    linear = [place for place, block in enumerate(blocks) if isinstance(block.attention, LinearAttention)]
    if linear:
        raise ValueError(
            f"the blocks of this LinearLM at {linear} are linear already, and all linear blocks share one method; take "
            'a model with pattern="s"'
        )
    if model.config.gate is not None:
        raise ValueError(
            f"the softmax of this LinearLM is gated (gate={model.config.gate!r}), and transformers' attention "
            "interface, by which calls are recorded and replaced, knows no gates; take a model with gate=None"
        )


def _settings(model: LinearLMForCausalLM, attentions: Mapping[str, LayerAttention]) -> dict[str, Any]:
    """The config of the linear model, as a dictionary."""
    methods = {name: _method(attention) for name, attention in attentions.items()}
    if len(set(methods.values())) != 1:
        forms = ", ".join(sorted(set(methods.values()))) or "none"
        raise ValueError(f"all linear blocks of a LinearLM share one method, got {forms}; {_LINEARIZE}")
    layers = [block.attention for block in model.model.blocks]
    kinds = "".join("s" if attention_of(layer) is None else "l" for layer in layers)
    maps = [each for attention in attentions.values() if (each := attention.feature_map) is not None]
    settings = {name: x for name, x in model.config.to_dict().items() if "attn_implementation" not in name}
    return {
        **settings,
        "pattern": "l" if set(kinds) == {"l"} else kinds,
        "method": next(iter(methods.values())),
        "num_features": None,
        "per_head": _are_per_head(maps, layers[0].num_kv_heads),
        "positions": _positions(model.config.positions, layers[0].positions, maps),
    }


def _method(attention: LayerAttention) -> str:
    """The written form of a map and its window."""
    feature_map = attention.feature_map
    # Merged keys take no causal layer's place.
    assert feature_map is not None
    default = feature_map.head_dim**-0.5
    scale = getattr(feature_map, "scale", default)
    if scale != default:
        raise ValueError(
            f"{attention.module_name} attends by a map of scale {scale}, and a LinearLM's maps have the scale of its "
            f"softmax, D**-0.5 = {default}; build the map with that scale"
        )
    label = written(feature_map)
    return label if attention.window is None else f"{label} + window {attention.window}"


def _are_per_head(maps: list[FeatureMap], num_kv_heads: int) -> bool:
    """Whether the maps have draws and weights for each key/value head; what is neither that nor one set is refused."""
    parts = (part for feature_map in maps for part in feature_map.modules() if isinstance(part, FeatureMap))
    # Statistics may be of each head without it: they are no matter of building the map.
    chosen = (part for part in parts if "num_heads" in inspect.signature(type(part)).parameters)
    head_counts: set[int] = {getattr(part, "num_heads", None) or 0 for part in chosen} - {0}
    if head_counts - {num_kv_heads}:
        raise ValueError(
            f"maps of a LinearLM hold one set of weights, or one for each of {num_kv_heads} key/value heads, got maps "
            f"for {sorted(head_counts)}; {_LINEARIZE}"
        )
    return bool(head_counts)


def _positions(text: str | None, positions: Position | None, maps: list[FeatureMap]) -> str | None:
    """The positions' written form; rotary ones admit these maps."""
    if text is None or not isinstance(positions, Rotary) or not any(map(_is_unsure, maps)):
        return text
    return taking_any_map(text)


def _is_unsure(feature_map: FeatureMap) -> bool:
    """Whether a map is not relative under rotary positions, or does not say so before it has its statistics."""
    takes_statistics = any(isinstance(part, FittedMap) and part.fitted_buffers for part in feature_map.modules())
    return takes_statistics or not keeps_rotations(feature_map)
