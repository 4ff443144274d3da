"""Where merged keys take the softmax's place: in layers without causality; a decoder's are those of a bounded cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from linattn.hf._attention_modules import AttentionModule, attention_modules
from linattn.hf.language_model import LinearLMForCausalLM
from linattn.hf.layer_attention import LayerAttention
from linattn.kv_cache import MergedKV
from linattn.methods.method import Method

CAUSAL = "it is causal, and a BoundedCache merges the keys of such layers"
"""Why a causal layer keeps its softmax beside others whose keys are merged."""

# The window of merged keys that are written without one.
_WINDOW = 64


def merged_alone(model: PreTrainedModel, layers: Collection[int] | None, methods: Sequence[Method]) -> MergedKV | None:
    """The merged keys, of several the first, where no method is a map; an error, before any pass, for a causal layer.

    Among several methods a layer's own is known once the layers are chosen; `refuse_merged_decoder` is for those.
    """
    configs = [method.merged for method in methods if method.merged is not None]
    if not configs:
        return None
    named = [part for part in attention_modules(model) if layers is None or part.number in layers]
    causal = [part for part in named if part.is_causal]
    merges = len(configs) == len(methods)
    if causal and (len(causal) == len(named) or (merges and layers is not None)):
        refuse_merged_decoder(model, causal[0], configs[0])
    return configs[0] if merges else None


def refuse_merged_decoder(model: PreTrainedModel, part: AttentionModule, config: MergedKV | None) -> None:
    """Refuse merged keys in a causal layer."""
    if part.is_causal and config is not None:
        raise ValueError(_refusal(model, part, config))


def refuse_converted_decoder(
    model: PreTrainedModel, part: AttentionModule, attention: LayerAttention, folder: Path
) -> None:
    """Refuse a folder whose causal layer has merged keys, as earlier versions converted decoders."""
    if part.is_causal and attention.merged is not None:
        source = f'transformers.{type(model).__name__}.from_pretrained({str(folder)!r}, attn_implementation="sdpa")'
        raise ValueError(
            f"{folder} holds a decoder whose {part.name} attends by {attention.merged.label}, as earlier versions "
            "converted it; its weights are those of a softmax model, whose KV cache is bounded now; write\n"
            f"    model = {source}\n"
            f"    cache = {_bounded_cache(model, attention.merged)}"
        )


def _refusal(model: PreTrainedModel, part: AttentionModule, config: MergedKV) -> str:
    """The error, with the two lines to write instead."""
    begin = f"{part.name} of {type(model).__name__} is causal, and linearize_ merges keys of encoders alone"
    if isinstance(model, LinearLMForCausalLM):
        return f"{begin}; give a feature map, as FavorPlus"
    call = "model.generate" if model.can_generate() else "model"
    return (
        f"{begin}; leave the model as it is, and bound its KV cache:\n"
        f"    cache = {_bounded_cache(model, config)}\n"
        f"    {call}(**inputs, past_key_values=cache)"
    )


def _bounded_cache(model: PreTrainedModel, config: MergedKV) -> str:
    """The code that makes a cache with these merged keys."""
    config = replace(config, window=config.window or _WINDOW)
    cache = f"linattn.hf.BoundedCache(model, config=linattn.{config!r})"
    if model.config.is_encoder_decoder:
        return f"transformers.EncoderDecoderCache({cache}, transformers.DynamicCache())"
    return cache
