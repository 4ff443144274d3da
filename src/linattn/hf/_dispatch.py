"""How a linearized model attends: by what a module has installed, else as before; letters as in hf/__init__.py."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache, PreTrainedModel

from linattn.hf._attention_modules import (
    attributes_beside,
    former_of,
    idle_configs,
    mark,
    parts_of,
    restore,
    switch_to,
    unmark,
)
from linattn.hf._bounded_layers import HandedKeys
from linattn.hf._calls import AnyMask, AskedMask, InterfaceCall, ask_mask, by_token, refuse_weights
from linattn.hf._folders import save_linearized
from linattn.hf.interception import NAME as INTERCEPTED
from linattn.hf.layer_attention import ATTRIBUTE, Attending, LayerAttention, attention_of
from linattn.hf.state_cache import EncoderDecoderStates, StateCache, StateLayer, refuse_text_again

NAME = "linattn"
UNDO = "linattn_undo"
"""Where a model keeps its former implementations and the hooks, to undo `install`; copies and pickles have it too."""

# The attribute of a linearized model's modules that names the attention implementation they had.
_FORMER = "linattn_former"
# The methods of a model that `_prepare_states`, where it generates at all, and `save_linearized` take the place of.
_PREPARE, _SAVE = "_prepare_cache_for_generation", "save_pretrained"

# The keyword by which attention modules pass the cache's layer on, unread.
_LAYER = "linattn_layer"
CACHES = ("past_key_values", "layer_past")
"""The names by which attention modules are given their cache; GPT-NeoX has a word of its own."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: AnyMask, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: transformers passes the options by keyword and wants (B, Lq, H, Dv)."""
    if type(key) is HandedKeys:
        return key.layer.attend(InterfaceCall(module, query, key.key, value, attention_mask, options, None)), None
    layer: StateLayer | None = options.pop(_LAYER, None)
    if isinstance(attention_mask, AskedMask) and attention_mask.cache is not None:
        attention_mask.cache.refuse_plain_keys(module)
    if isinstance(attention_mask, Tensor):
        attention_mask = attention_mask[..., -key.shape[-2] :]
    former: str | None = getattr(module, _FORMER) if hasattr(module, _FORMER) else former_of(module)
    call = InterfaceCall(module, query, key, value, attention_mask, options, former)
    attention = attention_of(module)
    if attention is None:
        if isinstance(attention_mask, AskedMask) and (count := attention_mask.num_surplus(key.shape[-2])) > 0:
            words = f"the model adds {count} keys to those of its tokens, and what hides some of them is lost here"
            raise ValueError(f"{words}; call its set_attn_implementation('eager')")
        return call.by_former()
    # Accelerate brings the tensors that it keeps elsewhere where a module is called, and parts of a map are not.
    hooks: list[Any] = [(part, part._hf_hook) for part in attention.modules() if hasattr(part, "_hf_hook")]
    for part, hook in hooks:
        hook.pre_forward(part)
    try:
        if layer is not None:
            return layer.attend(call), None
        key_mask, is_causal = call.read_mask(attention.module_name, key.shape[-2], takes=attention.takes)
        sinks = {} if call.sinks is None else {"sinks": call.sinks}
        out = attention(query, key, value, **call.scoring, key_mask=key_mask, is_causal=is_causal, **sinks)
        return by_token(out), None
    finally:
        for part, hook in hooks:
            hook.post_forward(part, None)


def install(model: PreTrainedModel, attentions: Sequence[Attending]) -> None:
    """Make these modules of a model attend by what was built for them and tried, and `generate` keep states."""
    # Nothing is changed before everything is built, and the switch undoes itself where a model refuses it.
    former = switch_to(model, NAME)
    formers = {id(config): name for config, name in former}
    idle = idle_configs(model, {part.module for part, _ in attentions})
    restore(tuple(each for each in former if id(each[0]) in idle))
    # A model that is built of such a configuration later has none of these names, and is refused.
    for attributes in attributes_beside(model):
        attributes[_FORMER] = formers.get(id(attributes.get("config")), formers[id(model.config)])
    for part, attention in attentions:
        part.module.add_module(ATTRIBUTE, attention)
    stateful = [part.module for part, _ in attentions if part.cache_place is not None]
    places = {part.cache_place for part, _ in attentions if part.cache_place is not None}
    hooks = []
    for module in stateful:
        offer = partial(_offer, list(inspect.signature(module.forward).parameters))
        hooks.append(module.register_forward_pre_hook(offer, with_kwargs=True))
    hooks += [module.register_forward_hook(_settle, with_kwargs=True) for module in stateful]
    for each in (part for part in parts_of(model) if id(part.config) not in idle):
        names = list(inspect.signature(each.forward).parameters)
        checks = refuse_weights, partial(refuse_text_again, names), partial(_check_call, names, places)
        hooks += [each.register_forward_pre_hook(check, with_kwargs=True) for check in checks]
    for each in (x for x in parts_of(model) if hasattr(type(x), _PREPARE)):  # BLIP-2 calls `generate` of a part
        if not set(each.modules()).isdisjoint(stateful):
            setattr(each, _PREPARE, partial(_prepare_states, each))
    setattr(model, _SAVE, partial(save_linearized, model))
    mark(model, idle)
    setattr(model, UNDO, (former, tuple(hooks)))


def uninstall(model: PreTrainedModel) -> None:
    """Undo `install`."""
    former, hooks = getattr(model, UNDO)
    restore(former)
    for hook in hooks:
        hook.remove()
    for attributes in list(attributes_beside(model)):
        attributes.pop(_FORMER, None)
        # Also one that is wrapped.
        held = attributes["_modules"].get(ATTRIBUTE)
        if held is not None and any(isinstance(part, LayerAttention) for part in held.modules()):
            del attributes["_modules"][ATTRIBUTE]
    for name in (_SAVE, UNDO):
        vars(model).pop(name, None)
    for each in parts_of(model):
        vars(each).pop(_PREPARE, None)
    unmark(model)


def _check_call(names: list[str], places: set[int], part: Any, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook of a model, by its arguments' names: refuse another attention function, or a cache's misuse.

    The places are those of its cache that hold states.
    """
    implementation = part.config._attn_implementation
    if implementation not in (NAME, INTERCEPTED):
        raise RuntimeError(
            f"{type(part).__name__} is linearized, and its attention implementation was set to {implementation!r} "
            "since, by which it would attend by softmax; call restore_(model) for that, or "
            f"model.set_attn_implementation({NAME!r}) to attend as linearized"
        )
    arguments = {**dict(zip(names, args, strict=False)), **options}
    # Of a decoder's own tokens, where a model reads two texts.
    side = "decoder_" if "decoder_attention_mask" in names else ""
    for argument in arguments.values():
        cache = _of_text(argument)
        if isinstance(argument, StateCache) and side:
            raise ValueError(
                f"{type(part).__name__} reads two texts, and was given the cache of its decoder's alone; write "
                "EncoderDecoderStates(StateCache(model), DynamicCache())"
            )
        if isinstance(cache, StateCache):
            if part.training and any(vars(each).get("gradient_checkpointing") for each in part.modules()):
                raise ValueError(
                    f"{type(part).__name__} is in training mode with gradient checkpointing, in which transformers "
                    "fills no cache; call model.eval(), or leave the cache out (use_cache=False)"
                )
            tokens = [arguments.get(f"{side}{name}") for name in ("input_ids", "inputs_embeds")]
            # Some models read each of a text's codebooks in a row of its own.
            is_split = hasattr(getattr(part.config, "decoder", part.config), "num_codebooks")
            cache.check_call(part.config, None if is_split else next((len(x) for x in tokens if x is not None), None))
            # Assistants that leave a model early have caches of its first layers.
            wanted = {place for place in places if place < len(cache.layers)}
            held = {place for place, layer in enumerate(cache.layers) if isinstance(layer, StateLayer)}
            if held != wanted:
                raise RuntimeError(
                    f"the cache holds states of layers {sorted(held)}, and {type(part).__name__} is linearized in "
                    f"{sorted(wanted)}; give it a cache of its own"
                )
            mask = arguments.get(f"{side}attention_mask")
            if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
                cache.check_mask(mask)


def _of_text(cache: Any) -> Any:
    """A cache of a text's own tokens, where two are held; anything else as it is."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _offer(names: list[str], module: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the cache's layer, a keyword more; transformers passes attention functions no cache."""
    arguments = {**dict(zip(names, args, strict=False)), **options}
    cache = _of_text(next((arguments[name] for name in CACHES if arguments.get(name) is not None), None))
    layer = cache.layers[module.layer_idx] if isinstance(cache, StateCache) else None
    if not isinstance(layer, StateLayer):
        return args, options
    layer.expect()
    return args, {**options, _LAYER: layer}


def _settle(module: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
    """Forward hook: an error if the keys did not come back."""
    if (layer := options.get(_LAYER)) is not None:
        layer.settle()


def _prepare_states(model: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any) -> None:
    """Prepare `generate`'s cache: states where it would grow; one that the user gave or named stays, without slots."""
    named = generation_config.cache_implementation
    is_chosen = model_kwargs.get("past_key_values") is not None or named == "dynamic"
    # Whisper takes the keys out of the cache that it returns, also where it sets this by itself, to try again.
    is_taken_apart = generation_config.return_dict_in_generate and hasattr(model, "generate_with_fallback")
    getattr(type(model), _PREPARE)(model, generation_config, model_kwargs, *rest)
    made = model_kwargs.get("past_key_values")
    if made is not None and made.is_compileable:
        cure = f" (model.generation_config.cache_implementation = None, if {named!r} is there)" if named else ""
        raise ValueError(
            f"{type(made).__name__} gives its empty slots to attention as keys, which a kernel cannot tell from "
            f"others; leave the cache out{cure}, and generate keeps states, whose size is constant too"
        )
    text_cache = _of_text(made)
    # As `generate` makes it by default.
    if not (is_chosen or is_taken_apart) and type(text_cache) is DynamicCache and not text_cache.offloading:
        states: Any = StateCache(model)
        if generation_config.is_assistant:
            states.activate_past_recording()
        # A decoder alone may read what an encoder gave, too.
        if isinstance(made, EncoderDecoderCache) or {"encoder_hidden_states", "encoder_outputs"} & model_kwargs.keys():
            states = EncoderDecoderStates(states, getattr(made, "cross_attention_cache", DynamicCache()))
        model_kwargs["past_key_values"] = states


# On import, not on use: a linearized model that is read from a pickle names them too. Without a mask function of the
# same name, transformers would drop padding without a word.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, ask_mask)
