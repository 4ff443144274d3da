"""Build the attention of layers from what `linearize_` was given, and try it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import PreTrainedModel

from linattn.attention import Exact
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf._attention_modules import AttentionModule
from linattn.hf.calibrating import Sample, calibrate_maps, calibrate_plans
from linattn.hf.layer_attention import LayerAttention
from linattn.planning import Plan
from linattn.planning.methods import parse_method


def build_planned(
    model: PreTrainedModel, chosen: list[AttentionModule], plans: Sequence[Plan], calibrate: Iterable[Sample] | None
) -> list[tuple[LayerAttention, str]]:
    """The attention of each layer's plan, and how many heads have which method."""
    pairs = list(zip(chosen, plans, strict=True))
    for found, plan in pairs:
        if plan.head_dim != found.head_dim or plan.is_causal != found.is_causal:
            kinds = ("bidirectional", "causal")
            raise ValueError(
                f"{found.name} (layer {found.number}) has heads of width {found.head_dim} and is "
                f"{kinds[found.is_causal]}, its plan is for heads of width {plan.head_dim} and "
                f"{kinds[plan.is_causal]}; give the plans of this model's layers, in order"
            )
    if calibrate is not None:
        plans = calibrate_plans(model, pairs, calibrate)
    return [(LayerAttention(plan, found.name), plan.summary) for found, plan in zip(chosen, plans, strict=True)]


def build_written(
    model: PreTrainedModel,
    chosen: list[AttentionModule],
    text: str,
    num_features: int | None,
    seed: int,
    calibrate: Iterable[Sample] | None,
) -> list[tuple[LayerAttention, str]]:
    """The attention of each layer by a written form, and the form in exact names."""
    method, built = parse_method(text), []
    for found in chosen:
        # At the default scale whatever the module's: LayerAttention makes up the difference with each call.
        options = {"num_features": num_features, "scale": found.head_dim**-0.5, "seed": seed + found.number}
        # Methods are built frozen, to be measured; in a model the weights of a learned map train with the model's.
        feature_map = method.build(found.head_dim, **options).requires_grad_(True)
        built.append(LayerAttention(feature_map, found.name, exact=method.exact))
    if calibrate is not None:
        calibrate_maps(model, list(zip(chosen, built, strict=True)), calibrate)
    return [(attention, method.label) for attention in built]


def build_mapped(
    model: PreTrainedModel,
    chosen: list[AttentionModule],
    feature_map: Callable[[int], FeatureMap] | None,
    exact: Exact | None,
    calibrate: Iterable[Sample] | None,
) -> list[tuple[LayerAttention, str]]:
    """The attention of each layer by a map that a function builds, and the map in words."""
    if isinstance(feature_map, FeatureMap) or not callable(feature_map):
        raise TypeError(
            f"feature_map must be text, or a function that builds a map from a head width, got "
            f"{type(feature_map).__name__}; write feature_map=lambda head_dim: FavorPlus(head_dim, 256)"
        )
    built = [LayerAttention(feature_map(found.head_dim), found.name, exact=exact) for found in chosen]
    if calibrate is not None:
        calibrate_maps(model, list(zip(chosen, built, strict=True)), calibrate)
    # What was fitted is a part of the words.
    return [(attention, attention.summary) for attention in built]


def try_out(found: AttentionModule, attention: LayerAttention, label: str) -> None:
    """Move it to the module's device and attend to one token, so that a map that cannot be used is refused now."""
    device = next(found.module.parameters(), torch.empty(0)).device
    attention.to(device)
    if attention.plan is not None:
        heads, value_dim = len(attention.plan.heads), attention.plan.value_dim
    else:
        # What a map holds for each key/value head is (Hkv, ·, ·), what it holds for all of them has two dimensions.
        held = (x.shape[0] for x in (*attention.parameters(), *attention.buffers()) if x.ndim == 3)
        heads, value_dim = max(held, default=1), found.head_dim
    token = torch.zeros(1, heads, 1, found.head_dim, device=device)
    value = token.new_zeros(1, heads, 1, value_dim)
    try:
        with torch.no_grad():
            attention(token, token, value, scale=found.head_dim**-0.5, is_causal=found.is_causal)
    except ValueError as error:
        fitted = [part for part in attention.modules() if isinstance(part, FittedMap)]
        is_unfitted = any(all(getattr(part, name) is None for name in part.fitted_buffers) for part in fitted)
        cure = "; in linearize_, calibrate=batches fits it to samples" if is_unfitted else ""
        raise ValueError(f"{found.name} (layer {found.number}) cannot attend by {label}: {error}{cure}") from error
