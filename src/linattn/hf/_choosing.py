"""Which attention layers of a model are replaced, or bounded by a cache, and why the others keep their softmax."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from linattn.hf._attention_modules import AttentionModule, attention_modules, parts_of
from linattn.hf._calls import CAPS, SINKS, AskedMask
from linattn.hf._probing import Probe, probe
from linattn.hf.interception import NAME as INTERCEPTED
from linattn.hf.interception import SWITCHING
from linattn.kv_cache import MergedKV
from linattn.kv_cache.budget import Sizes
from linattn.methods.method import Method

# The window of merged keys that are written without one.
_WINDOW = 64


def merged_alone(model: PreTrainedModel, layers: Collection[int] | None, methods: Sequence[Method]) -> MergedKV | None:
    """The merged keys, of several the first, where no method is a map; a causal layer is refused before any pass."""
    configs = [method.merged for method in methods if method.merged is not None]
    if not configs:
        return None
    named = [part for part in attention_modules(model) if layers is None or part.number in layers]
    causal = [part for part in named if part.is_causal]
    merges = len(configs) == len(methods)
    if causal and (len(causal) == len(named) or (merges and layers is not None)):
        refuse_merged_decoder(model, causal[0], configs[0])
    return configs[0] if merges else None


def refuse_merged_decoder(
    model: PreTrainedModel, part: AttentionModule, config: MergedKV | None, folder: Path | None = None
) -> None:
    """Refuse merged keys in a causal layer, of a folder perhaps, with the lines to write instead."""
    if part.is_causal and config is not None:
        kind, call, loading = type(model).__name__, "model.generate" if model.can_generate() else "model", ""
        if folder is not None:  # its weights are a softmax model's
            loading = f'    model = transformers.{kind}.from_pretrained({str(folder)!r}, attn_implementation="sdpa")\n'
        raise ValueError(
            f"{part.name} of {kind} is causal, and linearize_ merges keys of encoders alone; leave the "
            "model as it is, and bound its KV cache:\n"
            f"{loading}    cache = {_bounded_cache(model, config)}\n"
            f"    {call}(**inputs, past_key_values=cache)"
        )


def _bounded_cache(model: PreTrainedModel, config: MergedKV) -> str:
    """The code that makes a cache with these merged keys."""
    config = replace(config, window=config.window or _WINDOW)
    cache = f"linattn.hf.BoundedCache(model, config=linattn.{config!r})"
    if model.config.is_encoder_decoder:
        return f"linattn.hf.EncoderDecoderStates({cache}, transformers.DynamicCache())"
    return cache


def choose(
    model: PreTrainedModel,
    layers: Iterable[int] | None,
    example: Mapping[str, Any] | None,
    sample: Mapping[str, Any] | None = None,
    *,
    takes: Collection[str] = (),
    merged: MergedKV | None = None,
) -> tuple[list[AttentionModule], dict[int, str]]:
    """All attention modules, and why softmax stays in some, by number; an error where a named one has to keep it."""
    kind = type(model).__name__
    modules = _runnable_modules(model, "replaced")
    wanted = range(len(modules)) if layers is None else list(layers)
    if wrong := [layer for layer in wanted if isinstance(layer, bool) or layer not in range(len(modules))]:
        raise ValueError(f"{kind} has attention layers 0 to {len(modules) - 1}, got {wrong}; name some of those")
    if not wanted:
        raise ValueError(f"no layer of {kind} would be replaced: not among `layers`")
    probed = probe(model, example, sample)
    modules = probed.placed(modules)
    objections = _refusals(model, modules, probed, takes)
    if layers is None:
        reasons = {x.number: why for x in modules if (why := objections.get(x.number) or _caution(x, probed, merged))}
        if len(reasons) == len(modules):
            for part in modules:
                refuse_merged_decoder(model, part, merged)
            raise ValueError(f"no layer of {kind} would be replaced: {'; '.join(dict.fromkeys(reasons.values()))}")
        return modules, reasons
    if refused := [part for part in modules if part.number in wanted and part.number in objections]:
        others = [part.number for part in modules if part.number not in objections]
        cure = f"name others in `layers`: {others} can be" if others else "no layer of this model can be"
        raise ValueError(
            f"{refused[0].name} (layer {refused[0].number}) cannot be replaced: {objections[refused[0].number]}; {cure}"
        )
    return modules, {n: "not among `layers`" for n in range(len(modules)) if n not in wanted}


def _runnable_modules(model: PreTrainedModel, aim: str) -> list[AttentionModule]:
    """The attention modules of a model that can run; one without any, whatever the aim, is refused."""
    kind, modules = type(model).__name__, list(attention_modules(model))
    if not modules:
        raise ValueError(
            f"no layer of {kind} would be {aim}: it does not take its attention from transformers' AttentionInterface; "
            "choose a model that does (BERT, ModernBERT, GPT-2, Llama, Qwen and most newer ones)"
        )
    is_offloaded = any(hasattr(part, "_hf_hook") for part in model.modules())
    if not is_offloaded and any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            f"{kind} has weights on the meta device, which hold no numbers, so that no pass shows what "
            "its layers ask for; load its weights first"
        )
    return modules


def refuse_intercepted(model: PreTrainedModel) -> None:
    """Refuse a model whose calls another function answers."""
    if any(part.config._attn_implementation == INTERCEPTED for part in parts_of(model)):
        raise ValueError(f"{type(model).__name__} is being intercepted; leave the block of `intercept` first")


def _refusals(
    model: PreTrainedModel, parts: list[AttentionModule], probed: Probe, takes: Collection[str]
) -> dict[int, str]:
    """Why layers cannot be replaced."""
    objections = {part.number: words for part in parts if (words := probed.objection(part, takes))}
    cached = [part for part in parts if part.cache_place is not None and part.number not in objections]
    kinds = list(map(type, DynamicCache(config=model.config.get_text_config(decoder=True)).layers if cached else []))
    holders: dict[int | None, str] = {}
    for part in cached:
        place = part.cache_place or 0
        if place < len(kinds) and kinds[place] not in (DynamicLayer, DynamicSlidingWindowLayer):
            objections[part.number] = f"its place in a cache holds more than keys and values ({kinds[place].__name__})"
        elif place in holders:
            objections[part.number] = f"it has its place in the cache in common with {holders[place]}"
        else:
            holders[place] = part.name
    return objections


def _caution(part: AttentionModule, probed: Probe, merged: MergedKV | None) -> str | None:
    """Why a layer that nobody named keeps its softmax."""
    if part.is_causal and merged is not None:
        return "it is causal, and a BoundedCache merges the keys of such layers"
    if part.window is not None:
        return f"a sliding window of {part.window} tokens, already linear in length; name it in `layers` if need be"
    return probed.caution(part.module)


@dataclass(frozen=True)
class CachedLayer:
    """An attention module that keeps its text's keys and values in a cache."""

    number: int  # of the module, from 0, in the order of the model's modules
    name: str  # its qualified name
    place: int  # number of its layer in the cache
    sizes: Sizes | None  # of its keys and values; None where no pass called it
    num_key_heads: int  # how many heads of them
    window: int | None  # width of its sliding window, or None
    reason: str | None  # why its keys and values stay exact; None where they can be bounded


# Of each model, by its dtype and layers as it was probed: a request's cache is made without a pass.
_PROBED: WeakKeyDictionary[PreTrainedModel, tuple[object, tuple[CachedLayer, ...]]] = WeakKeyDictionary()


def cached_layers(model: PreTrainedModel) -> tuple[CachedLayer, ...]:
    """The layers of a model's cache, in order, learned from passes of a few tokens the first time."""
    # Two first requests may come at a time, and a model is probed by one of them.
    with SWITCHING:
        refuse_intercepted(model)
        parts = [(part.name, part.cache_place, part.window) for part in attention_modules(model)]
        shape = model.dtype, getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None), parts
        probed = _PROBED.get(model)
        if probed is None or probed[0] != shape:
            probed = shape, tuple(_probed(model))
            if any(layer.reason is None for layer in probed[1]):  # a refusal may be another thread's doing
                _PROBED[model] = probed
        return probed[1]


def _probed(model: PreTrainedModel) -> Iterator[CachedLayer]:
    """Probe a model now for the layers of its cache."""
    modules = _runnable_modules(model, "bounded")
    # A text without pictures: masks by which these see later tokens are refused where a call brings one.
    probe_of = probe(model, has_pictures=False)
    modules = probe_of.placed(modules)
    objections = _refusals(model, modules, probe_of, (SINKS, CAPS))
    for part in modules:
        if part.cache_place is not None:
            reason = objections.get(part.number) or _reason(part, probe_of, model)
            sizes, heads = None, 0
            if part.module in probe_of.calls:
                call = probe_of.calls[part.module][0]
                heads, groups = call.key.shape[1], max(call.query.shape[1] // call.key.shape[1], 1)
                sizes = Sizes(call.query.shape[-1], call.value.shape[-1], call.key.element_size(), groups)
            yield CachedLayer(part.number, part.name, part.cache_place, sizes, heads, part.window, reason)


def _reason(part: AttentionModule, probed: Probe, model: PreTrainedModel) -> str | None:
    """Why a layer stays exact that no kernel's limits speak against."""
    if not all(isinstance(call.mask, AskedMask) for call in probed.calls[part.module]):
        return "its model makes its masks itself, without transformers' mask functions"
    if part.module not in probed.reached:
        parts = [x for x in parts_of(model) if x is not model and x.can_generate()]
        if parts and "past_key_values" not in inspect.signature(model.forward).parameters:
            names = ", ".join(name for name, x in model.named_modules() if x in parts)
            return f"its forward pass takes no cache; make one for the part of it that generates ({names})"
        return "it attends to keys made of those in its cache (as MLA does, whose cache is small as it is)"
    caution = None if part.window is not None else probed.caution(part.module)
    # What else to do there is for a map.
    return None if caution is None else caution.partition(";")[0]
