"""Which layers of a causal model a bounded cache holds, how large their keys are, and why the others stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from linattn.hf._attention_modules import AttentionModule, attention_modules
from linattn.hf._calls import AskedMask
from linattn.hf._choosing import check_weights, objections_to
from linattn.hf._probing import Probe, probe
from linattn.kv_cache.budget import Sizes


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


# Of each model, by the dtype that it was probed in: a request's cache is made without a pass.
_PROBED: WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, tuple[CachedLayer, ...]]] = WeakKeyDictionary()


def cached_layers(model: PreTrainedModel) -> tuple[CachedLayer, ...]:
    """The layers of a model's cache, in order, learned from passes of a few tokens the first time."""
    probed = _PROBED.get(model)
    if probed is None or probed[0] != model.dtype:
        probed = _PROBED[model] = model.dtype, tuple(_probed(model))
    return probed[1]


def _probed(model: PreTrainedModel) -> Iterator[CachedLayer]:
    """Probe a model now for the layers of its cache."""
    modules = list(attention_modules(model))
    if not modules:
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, so that its "
            "cache cannot be bounded; choose a model that does (GPT-2, Llama, Qwen, Gemma and most newer ones)"
        )
    check_weights(model)
    probe_of = probe(model)
    modules = probe_of.placed(modules)
    objections = objections_to(model, modules, probe_of, takes_sinks=True)
    for part in modules:
        if part.cache_place is not None:
            reason = objections.get(part.number) or _reason(part, probe_of)
            heads = probe_of.calls[part.module][0].key.shape[1] if part.module in probe_of.calls else 0
            sizes = _sizes(part, probe_of)
            yield CachedLayer(part.number, part.name, part.cache_place, sizes, heads, part.window, reason)


def _reason(part: AttentionModule, probed: Probe) -> str | None:
    """Why a layer stays exact that no kernel's limits speak against."""
    if not all(isinstance(call.mask, AskedMask) for call in probed.calls[part.module]):
        return "its model makes its masks itself, without transformers' mask functions"
    if part.module not in probed.reached:
        return "its attention function is not given what its cache returns"
    caution = None if part.window is not None else probed.caution(part.module)
    # What else to do there is for a map.
    return None if caution is None else caution.partition(";")[0]


def _sizes(part: AttentionModule, probed: Probe) -> Sizes | None:
    """Of a layer's keys and values, as its calls have shown them."""
    if part.module not in probed.calls:
        return None
    call = probed.calls[part.module][0]
    num_groups = max(call.num_heads // call.key.shape[1], 1)
    return Sizes(call.head_dim, call.value_dim, call.key.element_size(), num_groups)
