"""Which attention layers of a model are replaced, and why the others keep their softmax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from linattn.hf._attention_modules import AttentionModule, attention_modules
from linattn.hf._merged_encoders import CAUSAL, refuse_merged_decoder
from linattn.hf._probing import Probe, probe
from linattn.kv_cache import MergedKV


@dataclass(frozen=True)
class Choice:
    """The attention modules of a model, and why the softmax of some stays, by their numbers."""

    modules: tuple[AttentionModule, ...]
    reasons: dict[int, str]

    @property
    def chosen(self) -> list[AttentionModule]:
        """The modules whose softmax is replaced."""
        return [module for module in self.modules if module.number not in self.reasons]


def choose(
    model: PreTrainedModel,
    layers: Iterable[int] | None,
    example: Mapping[str, Any] | None,
    sample: Mapping[str, Any] | None = None,
    *,
    takes_sinks: bool = False,
    merged: MergedKV | None = None,
) -> Choice:
    """The layers that are named, or all that nothing speaks against, after a probe; an error where one cannot be.

    What speaks against some depends on what takes their place: whether that takes sinks, or is merged keys.
    """
    kind = type(model).__name__
    modules = list(attention_modules(model))
    if not modules:
        raise ValueError(
            f"no layer of {kind} would be replaced: it does not take its attention from transformers' "
            "AttentionInterface; choose a model that does (BERT, ModernBERT, GPT-2, Llama, Qwen and most newer ones)"
        )
    check_weights(model)
    wanted = range(len(modules)) if layers is None else list(layers)
    wrong = [layer for layer in wanted if isinstance(layer, bool) or layer not in range(len(modules))]
    if wrong:
        raise ValueError(f"{kind} has attention layers 0 to {len(modules) - 1}, got {wrong}; name some of those")
    if not wanted:
        raise ValueError(f"no layer of {kind} would be replaced: not among `layers`")
    probed = probe(model, example, sample)
    modules = probed.placed(modules)
    objections = objections_to(model, modules, probed, takes_sinks=takes_sinks)
    if layers is None:
        cautions = {
            part.number: CAUSAL if part.is_causal and merged is not None else _caution(part, probed)
            for part in modules
            if part.number not in objections
        }
        reasons = objections | {number: words for number, words in cautions.items() if words is not None}
        if len(reasons) == len(modules):
            for part in modules:
                refuse_merged_decoder(model, part, merged)
            raise ValueError(f"no layer of {kind} would be replaced: {'; '.join(dict.fromkeys(reasons.values()))}")
        return Choice(tuple(modules), dict(sorted(reasons.items())))
    refused = [part for part in modules if part.number in wanted and part.number in objections]
    if refused:
        others = [part.number for part in modules if part.number not in objections]
        cure = f"name others in `layers`: {others} can be" if others else "no layer of this model can be"
        raise ValueError(
            f"{refused[0].name} (layer {refused[0].number}) cannot be replaced: {objections[refused[0].number]}; {cure}"
        )
    return Choice(tuple(modules), {n: "not among `layers`" for n in range(len(modules)) if n not in wanted})


def check_weights(model: PreTrainedModel) -> None:
    """Refuse a model that cannot run."""
    is_offloaded = any(hasattr(part, "_hf_hook") for part in model.modules())
    if not is_offloaded and any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has weights on the meta device, which hold no numbers, so that no pass shows what "
            "its layers ask for; load its weights first"
        )


def objections_to(
    model: PreTrainedModel, modules: list[AttentionModule], probed: Probe, *, takes_sinks: bool
) -> dict[int, str]:
    """Why layers cannot be replaced."""
    words = {
        part.number: probed.objection(part.module, is_cached=part.cache_place is not None, takes_sinks=takes_sinks)
        for part in modules
    }
    objections = {number: objection for number, objection in words.items() if objection is not None}
    cached = [part for part in modules if part.cache_place is not None and part.number not in objections]
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers if cached else []
    holders: dict[int | None, str] = {}
    for part in cached:
        place = part.cache_place or 0
        layer = layers[place] if place < len(layers) else None
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            objections[part.number] = "its place in the cache also holds the state of a recurrent layer"
        elif place in holders:
            objections[part.number] = f"it has its place in the cache in common with {holders[place]}"
        else:
            holders[place] = part.name
    return objections


def _caution(part: AttentionModule, probed: Probe) -> str | None:
    """Why a layer that nobody named keeps its softmax."""
    if part.window is not None:
        return f"a sliding window of {part.window} tokens, linear as it is; name it in `layers` if need be"
    return probed.caution(part.module)
