"""How a linearized model comes to use a `StateCache`: made by `generate`, handed to the attention function."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode

from linattn.hf._dispatch import LAYER
from linattn.hf.state_cache import StateCache, StateLayer

PREPARE = "_prepare_cache_for_generation"
"""The method of a model that `StatesByDefault` takes the place of, where the model generates at all."""

# What attention modules call their cache; GPT-NeoX has a word of its own.
_CACHES = ("past_key_values", "layer_past")


def hand_over(module: nn.Module) -> list[RemovableHandle]:
    """Make an attention module pass the cache's layer to its attention function; transformers passes it no cache."""
    return [
        module.register_forward_pre_hook(_offer, with_kwargs=True),
        module.register_forward_hook(_settle, with_kwargs=True),
    ]


def check_caches(part: nn.Module, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook of models: a cache of states that an error left between two layers is refused."""
    for given in (*args, *options.values()):
        cache: Any = given.self_attention_cache if isinstance(given, EncoderDecoderCache) else given
        if isinstance(cache, StateCache):
            cache.check_level()


def _offer(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: one keyword more, which the module hands on unread."""
    cache: Any = next((options[name] for name in _CACHES if options.get(name) is not None), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    place: Any = module.layer_idx
    layer = cache.layers[place] if isinstance(cache, StateCache) else None
    if not isinstance(layer, StateLayer):
        return args, options
    layer.expect()
    return args, {**options, LAYER: layer}


def _settle(module: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
    """Forward hook: an error if the keys did not come back."""
    layer = options.get(LAYER)
    if layer is not None:
        layer.settle()


class StatesByDefault:
    """A model's own way to prepare a cache, its growing cache exchanged for states; an object, which can be pickled."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: GenerationMode, *sizes: int
    ) -> None:
        """Prepare the cache; one that the user gave or chose by name, or that must be cropped, stays."""
        is_given = model_kwargs.get("past_key_values") is not None
        is_named = generation_config.cache_implementation == "dynamic"
        getattr(type(self.model), PREPARE)(self.model, generation_config, model_kwargs, generation_mode, *sizes)
        made = model_kwargs.get("past_key_values")
        if made is not None and made.is_compileable:
            raise ValueError(
                f"{type(made).__name__} gives its empty slots to attention as keys, which a kernel cannot tell from "
                "others; leave the cache out, and generate keeps states, whose size is constant too"
            )
        is_cropped = generation_mode is GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        if is_given or is_named or is_cropped:
            return
        if isinstance(made, EncoderDecoderCache) and _is_ordinary(made.self_attention_cache):
            states = StateCache(self.model)
            model_kwargs["past_key_values"] = EncoderDecoderCache(states, made.cross_attention_cache)
        elif _is_ordinary(made):
            model_kwargs["past_key_values"] = StateCache(self.model)


def _is_ordinary(cache: Cache | None) -> bool:
    """True if it is what `generate` makes by default."""
    return type(cache) is DynamicCache and not cache.offloading
