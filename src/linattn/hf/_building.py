"""What takes the place of each chosen layer's softmax: built from plans, methods or maps, and tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import PreTrainedModel

from linattn.attention import Exact
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf._attention_modules import AttentionModule
from linattn.hf.calibrating import Sample, calibrate_plans
from linattn.hf.layer_attention import LayerAttention
from linattn.planning import Plan
from linattn.planning.methods import Method

Attending = tuple[AttentionModule, LayerAttention]
"""An attention module and what attends in its place."""


def attend_by_plans(
    model: PreTrainedModel, chosen: list[AttentionModule], plans: Sequence[Plan], calibrate: Iterable[Sample] | None
) -> list[Attending]:
    """The attention of each layer by its plan."""
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
    return [(found, LayerAttention(plan, found.name)) for found, plan in zip(chosen, plans, strict=True)]


def written_form(written: object) -> str:
    """A layer's written form."""
    if not isinstance(written, str):
        raise TypeError(
            f"feature_map must hold a written form for each layer, got {type(written).__name__}; give maps by a "
            "function, called once for each layer, as in feature_map=lambda head_dim: next(maps)"
        )
    return written


def attend_by_methods(
    chosen: list[AttentionModule], methods: Sequence[Method], num_features: int | None, seed: int
) -> list[Attending]:
    """The attention of each layer by its method."""
    built = []
    for found, method in zip(chosen, methods, strict=True):
        # At the default scale whatever the module's: LayerAttention makes up the difference with each call.
        options = {"num_features": num_features, "scale": found.head_dim**-0.5, "seed": seed + found.number}
        # Methods are built frozen, to be measured; in a model the weights of a learned map train with the model's.
        feature_map = method.build(found.head_dim, **options).requires_grad_(True)
        built.append((found, LayerAttention(feature_map, found.name, exact=method.exact)))
    return built


def attend_by_function(
    chosen: list[AttentionModule],
    feature_map: Callable[[int], FeatureMap] | None,
    exact: Exact | Sequence[Exact | None] | None,
) -> list[Attending]:
    """The attention of each layer by a map that a function builds."""
    if isinstance(feature_map, FeatureMap) or not callable(feature_map):
        raise TypeError(
            f"feature_map must be text, or a function that builds a map from a head width, got "
            f"{type(feature_map).__name__}; write feature_map=lambda head_dim: FavorPlus(head_dim, 256)"
        )
    rules = [exact] * len(chosen) if exact is None or isinstance(exact, Exact) else exact
    pairs = zip(chosen, rules, strict=True)
    return [(found, LayerAttention(feature_map(found.head_dim), found.name, exact=rule)) for found, rule in pairs]


def try_out(found: AttentionModule, attention: LayerAttention, label: str) -> None:
    """Move it to the module's device and attend to one token, so that a map that cannot be used is refused now."""
    device = found.device or next(found.module.parameters(), torch.empty(0)).device
    attention.to(device)
    # What a map holds for each key/value head is (Hkv, ·, ·), what it holds for all of them has two dimensions.
    held = (x.shape[0] for x in (*attention.parameters(), *attention.buffers()) if x.ndim == 3)
    plan = attention.plan
    heads, value_dim = (max(held, default=1), found.head_dim) if plan is None else (len(plan.heads), plan.value_dim)
    token = torch.zeros(1, heads, 1, found.head_dim, device=device)
    value = token.new_zeros(1, heads, 1, value_dim)
    if found.reads_another_text and attention.rules:
        raise ValueError(
            f"{found.name} (layer {found.number}) cannot attend by {label}: its queries are a decoder's and its keys "
            "another text's, so that keys chosen or merged by all queries let earlier ones learn of later ones, and "
            "a window has no place; give it a feature map alone, or leave it out of `layers`"
        )
    is_ordered = found.is_causal or found.reads_another_text
    try:
        with torch.no_grad():
            # One query and one key: causality hides nothing, and refuses maps that would learn from later queries.
            attention(token, token, value, scale=found.head_dim**-0.5, is_causal=is_ordered)
    except ValueError as error:
        fitted = [part for part in attention.modules() if isinstance(part, FittedMap)]
        is_unfitted = any(all(getattr(part, name) is None for name in part.fitted_buffers) for part in fitted)
        cure = "; in linearize_, calibrate=batches fits it to samples" if is_unfitted else ""
        raise ValueError(f"{found.name} (layer {found.number}) cannot attend by {label}: {error}{cure}") from error
