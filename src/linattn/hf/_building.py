"""Build the attention that replaces each chosen layer's softmax, from methods or a function, and try it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from linattn.feature_maps import FEATURE_MAPS, FeatureMap, FittedMap
from linattn.hf._attention_modules import AttentionModule
from linattn.hf._calls import SINKS
from linattn.hf.layer_attention import LayerAttention
from linattn.kv_cache import MergedKV
from linattn.methods.method import Method, parse_method

Attending = tuple[AttentionModule, LayerAttention]
"""An attention module and what attends in its place."""


def as_method(method: object) -> Method:
    """A layer's method, read where it is in writing."""
    if isinstance(method, MergedKV):
        return Method(None, merged=method)
    if isinstance(method, str):
        return parse_method(method)
    raise TypeError(
        f"method must be text, a MergedKV, one of these for each layer, or a function that builds a map from a head "
        f"width, got {type(method).__name__}; write method=lambda head_dim: FavorPlus(head_dim, 256)"
    )


def attend_by_methods(
    chosen: list[AttentionModule], methods: Sequence[Method], num_features: int | None, seed: int
) -> list[Attending]:
    """The attention of each layer by its method."""
    built = []
    for part, method in zip(chosen, methods, strict=True):
        # At the default scale whatever the module's: LayerAttention makes up the difference with each call.
        scale, drawn = part.head_dim**-0.5, seed + part.number
        kernel = method.build_kernel(part.head_dim, num_features=num_features, scale=scale, seed=drawn)
        if isinstance(kernel, FeatureMap):
            # Methods are built frozen, to be measured; in a model the weights of a learned map train with the model's.
            kernel.requires_grad_(True)
        built.append((part, LayerAttention(kernel, part.name, window=method.window)))
    return built


def attend_by_function(
    chosen: list[AttentionModule],
    kernel: Callable[[int], FeatureMap | MergedKV],
    window: int | Sequence[int | None] | None,
) -> list[Attending]:
    """The attention of each layer by what a function returns."""
    windows = window if isinstance(window, Sequence) else [window] * len(chosen)
    pairs = zip(chosen, windows, strict=True)
    return [(part, LayerAttention(kernel(part.head_dim), part.name, window=width)) for part, width in pairs]


def take_sinks(methods: Sequence[Method]) -> bool:
    """Whether there are methods and each is on the softmax kernel's scale, as far as its written form says."""
    return bool(methods) and all(
        method.map is not None and FEATURE_MAPS[method.map.name].softmax_kernel for method in methods
    )


def try_out(found: AttentionModule, attention: LayerAttention, label: str) -> None:
    """Move it to the module's device and attend to one token, so that a map that cannot be used is refused now."""
    device = found.device or next(found.module.parameters(), torch.empty(0)).device
    attention.to(device)
    # What a map holds for each key/value head is (Hkv, ·, ·), what it holds for all of them has two dimensions.
    held = (x.shape[0] for x in (*attention.parameters(), *attention.buffers()) if x.ndim == 3)
    token = torch.zeros(1, max(held, default=1), 1, found.head_dim, device=device)
    if found.reads_another_text and (attention.window is not None or attention.merged is not None):
        raise ValueError(
            f"{found.name} (layer {found.number}) cannot attend by {label}: its queries are a decoder's and its keys "
            "another text's, so that keys merged by all queries let earlier ones learn of later ones, and "
            "a window has no place; give it a feature map alone, or leave it out of `layers`"
        )
    if found.has_sinks and not attention.takes_sinks:
        raise ValueError(
            f"{found.name} (layer {found.number}) asks for {SINKS}, and {label} has no positive normaliser that they "
            "could share; give another map, as FavorPlus"
        )
    is_ordered = found.is_causal or found.reads_another_text
    try:
        with torch.no_grad():
            # One query and one key: causality hides nothing, and refuses maps that would learn from later queries.
            attention(token, token, token, scale=found.head_dim**-0.5, is_causal=is_ordered)
    except ValueError as error:
        fitted = [part for part in attention.modules() if isinstance(part, FittedMap)]
        is_unfitted = any(all(getattr(part, name) is None for name in part.fitted_buffers) for part in fitted)
        cure = "; in linearize_, calibrate=batches fits it to samples" if is_unfitted else ""
        raise ValueError(f"{found.name} (layer {found.number}) cannot attend by {label}: {error}{cure}") from error
