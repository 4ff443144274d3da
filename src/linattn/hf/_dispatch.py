"""How a linearized model attends: by what `linearize_` put into a module, else as before; `generate` keeps states.

Letters: B batch, H query heads, L tokens (Lq, Lk), Dv value width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode

from linattn.hf._calls import AnyMask, InterfaceCall, ask_mask, by_token
from linattn.hf.layer_attention import attention_of
from linattn.hf.state_cache import StateCache, StateLayer

NAME = "linattn"
FORMER = "linattn_former"
"""The attribute of a linearized model's modules that names the attention implementation they had."""
PREPARE = "_prepare_cache_for_generation"
"""The method of a model that `StatesByDefault` takes the place of, where the model generates at all."""

# The keyword by which attention modules pass the cache's layer on, unread.
_LAYER = "linattn_layer"
# What attention modules call their cache; GPT-NeoX has a word of its own.
_CACHES = ("past_key_values", "layer_past")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: AnyMask, **options: Any
) -> tuple[Tensor, None]:
    """The registered attention function: transformers passes the options by keyword and wants (B, Lq, H, Dv)."""
    layer: StateLayer | None = options.pop(_LAYER, None)
    former: Any = getattr(module, FORMER, NAME)
    if former == NAME:
        raise RuntimeError(
            f"{type(module).__name__} names {NAME!r} as its attention implementation, and linearize_ did not put it "
            "there: load the model with its own attention and call linattn.hf.linearize_ on it, or read a saved one by "
            "linattn.hf.from_pretrained"
        )
    if isinstance(attention_mask, Tensor):
        attention_mask = attention_mask[..., -key.shape[-2] :]
    call = InterfaceCall(module, query, key, value, attention_mask, options, former)
    attention = attention_of(module)
    if attention is None:
        return call.by_former(), None
    name = attention.module_name
    call.refuse_options(name, key.shape[-2] + (0 if layer is None else layer.num_tokens))
    key_mask, is_causal = call.read_mask(name)
    if layer is None:
        out: Tensor = attention(query, key, value, scale=call.scale, key_mask=key_mask, is_causal=is_causal)
        return by_token(out), None
    # A single query sees all keys, causal or not.
    if not is_causal and query.shape[-2] > 1:
        raise ValueError(
            f"{name} lets queries see later keys, which a cache of states does not hold; pass use_cache=False"
        )
    return by_token(layer.advance(attention, call, key_mask)), None


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
    """Forward pre-hook: one keyword more."""
    cache: Any = next((options[name] for name in _CACHES if options.get(name) is not None), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    place: Any = module.layer_idx
    layer = cache.layers[place] if isinstance(cache, StateCache) else None
    if not isinstance(layer, StateLayer):
        return args, options
    layer.expect()
    return args, {**options, _LAYER: layer}


def _settle(module: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
    """Forward hook: an error if the keys did not come back."""
    layer = options.get(_LAYER)
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


# On import, not on use: a linearized model that is read from a pickle names them too. Without a mask function of the
# same name, transformers would drop padding without a word.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, ask_mask)
