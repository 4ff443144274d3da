"""Probe what attention modules ask for, by passes of a few tokens; letters as in hf/__init__.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function

from linattn.hf._attention_modules import AttentionModule
from linattn.hf._calls import CAPS, SINKS, AskedMask, InterfaceCall, inexpressible
from linattn.hf._dispatch import CACHES
from linattn.hf.interception import SWITCHING, answering, is_near
from linattn.softmax.precision import outside_autocast

# The attribute of keys that a probe's cache gave.
_GIVEN = "linattn_given"
# Tokens of a text that is longer than any window in use.
_FAR = 2**17
# Tokens of a text and of a decoder's side: other numbers, so that cross attention shows by the number of its keys.
_TOKENS, _TARGETS = 6, 4
# Arguments that say which tokens are of a picture, on which the masks of some decoders depend.
_KINDS = ("token_type_ids", "mm_token_type_ids")

Inputs = dict[str, Any]
Example = Mapping[str, Any] | None
# Held with their tensors, so that no other tensor takes the place of a key in memory.
Calls = dict[nn.Module, list[InterfaceCall]]


@dataclass(frozen=True)
class Probe:
    """The attention calls of each module of a model, in passes without and with padding."""

    calls: Calls  # of each module that was called, in order, those of all passes
    num_passes: int  # how many passes there were
    inputs: tuple[str, ...]  # names of what the passes were given
    cached: frozenset[nn.Module]  # the modules that were given a cache, in a pass as `generate` makes them
    refused_cache: str | None  # the kind of that pass's error; None where there was none
    reached: frozenset[nn.Module]  # the modules whose attention functions were given what their cache gave them

    def placed(self, parts: Iterable[AttentionModule]) -> list[AttentionModule]:
        """Modules with what their calls tell of their queries and keys; as they are where no pass called them."""
        parts, placed = list(parts), []
        has_order = any(part.is_causal for part in parts if part.module in self.calls)
        for part in parts:
            if calls := self.calls.get(part.module):
                reads_another_text = has_order and not part.is_causal and self._is_crossed(part.module)
                hides = any(mask.function is causal_mask_function for mask in self._masks(part.module))
                has_sinks = any(call.sinks is not None for call in calls)
                shown: Any = {"width": calls[0].query.shape[-1], "device": calls[0].key.device, "hides_later": hides}
                part = replace(part, **shown, reads_another_text=reads_another_text, has_sinks=has_sinks)
            placed.append(part)
        return placed

    def objection(self, part: AttentionModule, takes: Collection[str]) -> str | None:
        """Why no kernel that takes this can take a module's place; None where nothing speaks against it."""
        module, is_cached = part.module, part.cache_place is not None
        if (calls := self.calls.get(module)) is None:
            names = ", ".join(self.inputs)
            return f"a pass over {names} does not call it; give example={{…}}, inputs of the model that reach it"
        if words := dict.fromkeys(words for call in calls for words in inexpressible(call.options, (SINKS, CAPS))):
            return f"it asks for {', '.join(words)}, which neither a feature map nor merged keys can express"
        if CAPS not in takes and any("soft_cap" in call.scoring for call in calls):
            return (
                f"it asks for {CAPS}, which no feature map can express; a BoundedCache takes them, and linearize_ in "
                "encoders, for merged keys alone"
            )
        if SINKS not in takes and any(call.sinks is not None for call in calls):
            return (
                f"it asks for {SINKS}, which linearize_ gives to written forms of maps for the softmax kernel, as "
                "FavorPlus, alone, and convert_ to none; a BoundedCache takes them"
            )
        if any(isinstance(call.mask, Tensor) and call.mask.ndim != 2 for call in calls):
            return "its model gives it a mask of pairs, or a bias on them, that a kernel φ(q)·φ(k) cannot express"
        if any(mask.part is not None for mask in self._masks(module)):
            return "its model takes a part of its mask"
        shapes = [(call.key.shape, call.value.shape, call.query.shape[1]) for call in calls]
        if any(key[:3] != value[:3] or num_heads % key[1] for key, value, num_heads in shapes):
            return "its keys and values are not as many, or have not as many heads"
        if any(call.is_causal is None and not isinstance(call.mask, AskedMask) for call in calls):
            return "it does not say whether it is causal"
        if is_cached and len(calls) > self.num_passes:
            times = len(calls) // self.num_passes
            return f"it attends {times} times in a pass, and its tokens would be counted as often"
        places = {call.key.data_ptr() for call in calls}
        others = (call for other, several in self.calls.items() if other is not module for call in several)
        if is_cached and any(call.key.data_ptr() in places for call in others):
            return "another layer attends to its keys too, and a state does not give them back"
        if is_cached and self.refused_cache is not None:
            return (
                f"its model does not run with a DynamicCache ({self.refused_cache}), and one of linattn's would "
                "stand in its place; take a model that does"
            )
        takes_cache = any(name in inspect.signature(module.forward).parameters for name in CACHES)
        if not is_cached and takes_cache and part.hides_later:
            return "its mask is causal and the module does not say so (is_causal), so that no cache holds its state"
        return None

    def caution(self, module: nn.Module) -> str | None:
        """Why a module's softmax stays unless it is named; None where nothing speaks for that."""
        structured = [mask for mask in self._masks(module) if not mask.is_plain]
        if sizes := [mask.local_size for mask in structured if mask.local_size is not None]:
            return f"a mask of windows or chunks of {sizes[0]} tokens; name it in `layers` if all texts fit in one"
        if any(isinstance(mask.read(mask.sizes[2]), str) or mask.hides_far_keys(_FAR) for mask in structured):
            return (
                "a mask that depends on more than which token is first, such as one by which tokens of a picture see "
                "later ones; name it in `layers` if the model will be given none"
            )
        is_crossed = self._is_crossed(module)
        if module in self.cached and not getattr(module, "is_causal", False) and not is_crossed:
            return (
                "its tokens see later ones, and generate gives it a cache of earlier ones; build the model as a "
                "decoder (is_decoder=True), or name the layer in `layers` if the model will not generate"
            )
        if is_crossed:
            return "keys of other tokens than its queries' (cross attention), or fewer; name it in `layers` if need be"
        return None

    def _masks(self, module: nn.Module) -> list[AskedMask]:
        """The masks that were asked for."""
        return [call.mask for call in self.calls[module] if isinstance(call.mask, AskedMask)]

    def _is_crossed(self, module: nn.Module) -> bool:
        """True if a module's keys are not as many as its queries."""
        return any(call.query.shape[2] != call.key.shape[2] for call in self.calls[module])


def probe(
    model: PreTrainedModel, example: Example = None, sample: Example = None, *, has_pictures: bool = True
) -> Probe:
    """Record the attention calls of passes of a few tokens, answered as the model itself does; nothing is changed."""
    upcasts = any(getattr(module, "reorder_and_upcast_attn", False) for module in model.modules())
    if upcasts and model.config._attn_implementation == "eager":
        raise ValueError(
            f"{type(model).__name__} has reorder_and_upcast_attn, which its eager attention alone obeys and linattn "
            'would turn off; load it with attn_implementation="sdpa", or with reorder_and_upcast_attn=False'
        )
    with SWITCHING, _undisturbed(model):
        likely, errors = example_inputs(model, has_pictures=has_pictures), []
        attempts = [example] if example is not None else chain(likely, [] if sample is None else [sample])
        for inputs in (on_device(attempt, model) for attempt in attempts):
            calls = _run(model, inputs)
            if isinstance(calls, Exception):
                errors.append(f"{', '.join(inputs) or 'nothing'}: {type(calls).__name__}: {calls}")
                continue
            other = padded(model, inputs)
            more = None if other is None else _run(model, other)
            num_passes = 2 if isinstance(more, dict) else 1
            for module, made in more.items() if isinstance(more, dict) else ():
                calls.setdefault(module, []).extend(made)
            return Probe(calls, num_passes, tuple(inputs), *_run_with_cache(model, inputs, calls))
    origin = "inputs made for it" if example is None else "the example"
    cure = "give example={…}, a mapping of inputs that it runs on, to show what its layers ask for"
    if not has_pictures:
        cure = "a BoundedCache is made for models that do; generate without one"
    raise ValueError(f"{type(model).__name__} does not run on {origin} ({'; '.join(errors)}); {cure}")


def _run(model: PreTrainedModel, inputs: Inputs) -> Calls | Exception:
    """Record a pass; an error of the model's own is returned, one that interception causes is raised."""
    calls: Calls = {}

    def record(call: InterfaceCall) -> Tensor:
        """Keep the call, answer as the model does."""
        calls.setdefault(call.module, []).append(call)
        return call.by_former()[0]

    try:
        wanted = _outputs(model, inputs)
    # A model's code may raise anything.
    except Exception as error:
        return error
    try:
        with answering(model, record):
            got = _outputs(model, inputs)
        # One that makes nothing of a mask that is no tensor is another model without a word.
        if any((x - y).norm() > torch.finfo(y.dtype).eps ** 0.5 * y.norm() for x, y in zip(got, wanted, strict=True)):
            raise ValueError("its output is another one")
    except Exception as error:
        cause = f"it does not run under another attention function than transformers' own ({error})"
        if AskedMask.__name__ in str(error):
            cause = "it computes with its mask of pairs, by adding a bias or choosing keys, before attention reads it"
        raise ValueError(
            f"no layer of {type(model).__name__} can be replaced: {cause}; take a model that passes its masks on"
        ) from error
    return calls


def _outputs(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    """Floating tensors that a pass gives, but attention weights; random numbers go on as if it had drawn none."""
    with torch.random.fork_rng(sorted({x.device.index for x in model.parameters() if x.device.type == "cuda"})):
        output = model(**inputs)
    # Attention functions differ in whether they give weights, which tuples do not name.
    parts = [x for name, x in output.items() if "attentions" not in name] if isinstance(output, Mapping) else output[0]
    return [x for x in pytree.tree_leaves(parts) if isinstance(x, Tensor) and x.is_floating_point()]


def _run_with_cache(
    model: PreTrainedModel, inputs: Inputs, modules: Iterable[nn.Module]
) -> tuple[frozenset[nn.Module], str | None, frozenset[nn.Module]]:
    """The modules that a model which generates gives its cache to, an error's kind if it takes none, and `reached`."""
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return frozenset(), None, frozenset()
    cached, reached = set(), set()

    def note(module: nn.Module, args: Any, options: dict[str, Any] | None = None) -> None:
        """Forward pre-hook of an attention module; another thread may meet it half registered, without keywords."""
        names = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
        if options is not None and is_near(answer) and any({**names, **options}.get(x) is not None for x in CACHES):
            cached.add(module)

    def answer(call: InterfaceCall) -> Tensor:
        """Note whether a cache gave these keys."""
        if hasattr(call.key, _GIVEN):
            reached.add(call.module)
        return call.by_former()[0]

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        try:
            cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
            for layer in cache.layers:
                if isinstance(layer, DynamicLayer):
                    vars(layer)["update"] = partial(_marked, layer.update)
            if model.config.is_encoder_decoder:
                cache = EncoderDecoderCache(cache, DynamicCache(config=model.config.get_text_config(decoder=True)))
            with answering(model, answer):
                _outputs(model, {**inputs, "past_key_values": cache})
        except Exception as error:
            # A model's code may raise anything where it does not take this kind of cache: the caller is told which.
            return frozenset(), type(error).__name__, frozenset()
    return frozenset(cached if model.can_generate() else ()), None, frozenset(reached)


def _marked(update: Callable[..., tuple[Tensor, Tensor]], *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """A cache layer's keys and values, the keys marked as such."""
    key, value = update(*tensors, **options)
    setattr(key, _GIVEN, True)
    return key, value


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients, autocast or graphs, which lose marks; then all that modules hold as it was."""
    parts = [vars(module) for module in model.modules()]
    # What dictionaries hold too: BigBird takes other modules for short texts, and outputs are captured by hooks.
    tables = [*parts, *(x for part in parts for x in list(part.values()) if isinstance(x, dict))]
    held = [(table, dict(table)) for table in tables]
    devices = {x.device for x in model.parameters() if not x.is_meta}
    try:
        # Other threads that call the model meanwhile do so in this mode, and draw random numbers twice.
        model.train(False)
        with ExitStack() as block, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for device in devices:
                block.enter_context(outside_autocast(device))
            yield
    finally:
        # What is as it was is not touched, as other threads read it.
        for table, former in held:
            if list(table) != list(former):
                table.clear()
            table.update({name: x for name, x in former.items() if name not in table or table[name] is not x})


def example_inputs(model: PreTrainedModel, *, has_pictures: bool = True) -> Iterator[Inputs]:
    """Inputs of two rows that a model may run on, likeliest first; some tokens may be said to be of a picture."""
    arguments, main = inspect.signature(model.forward).parameters, model.main_input_name
    targets = {"decoder_input_ids": _tokens(model, _TARGETS)} if "decoder_input_ids" in arguments else {}
    pictures = [{"pixel_values": x} for x in _pictures(model)] if "pixel_values" in arguments else []
    sounds = [{name: x} for name in ("input_features", "input_values") if name in arguments for x in _sounds(model)]
    kinds = [name for name in _KINDS if name in arguments and has_pictures]
    texts = list(_texts(model, kinds)) if "input_ids" in arguments else []
    leading = {"input_features": sounds, "input_values": sounds, "pixel_values": pictures}.get(main, texts)
    rest = [*pictures, *sounds] if leading is texts else texts
    yield from ({**inputs, **targets} for inputs in leading)
    yield from ({**one, **other} for one in leading for other in rest)
    # A model's own word, for families with arguments of their own.
    dummies = model.dummy_inputs or {}
    yield {name: x for name, x in dummies.items() if isinstance(x, Tensor) and name in arguments}


def padded(model: PreTrainedModel, inputs: Inputs) -> Inputs | None:
    """The inputs, the second row's first place being padding; None where a model or the inputs know no padding."""
    arguments = inspect.signature(model.forward).parameters
    masks = {}
    for name, mask_name in {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}.items():
        tokens = inputs.get(name)
        if mask_name in arguments and mask_name not in inputs and isinstance(tokens, Tensor) and tokens.ndim == 2:
            masks[mask_name] = torch.ones_like(tokens)
            masks[mask_name][-1, 0] = 0
    return {**inputs, **masks} if masks else None


def on_device(inputs: Mapping[str, Any], model: PreTrainedModel) -> Inputs:
    """Inputs where a model takes them: on the CPU if its first weight is offloaded, from where hooks move them."""
    device = "cpu" if model.device.type == "meta" else model.device
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _texts(model: PreTrainedModel, kinds: list[str]) -> Iterator[Inputs]:
    """Texts; where a model reads pictures too, first some of whose tokens are said to be of one."""
    tokens = {"input_ids": _tokens(model, _TOKENS)}
    if kinds and getattr(model.config, "vision_config", None) is not None:
        places = (torch.arange(_TOKENS) % 3 == 1).long().expand(2, -1)
        yield {**tokens, **dict.fromkeys(kinds, places)}
    yield tokens


def _tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Token numbers (2, L), none of which the configuration names as special."""
    try:
        config = model.config.get_text_config()
    # Of texts of two kinds those of the encoder.
    except ValueError:
        config = model.config.get_text_config(encoder=True)
    named = [value for part in (model.config, config) for name, value in vars(part).items() if "token" in name]
    special = {number for value in named for number in (value if isinstance(value, list | tuple) else [value])}
    size = getattr(config, "vocab_size", None)
    ordinary = [n for n in range(min(size, 100) if isinstance(size, int) else 2) if n not in special] or [0]
    numbers = [ordinary[place % len(ordinary)] for place in range(2 * length)]
    return torch.tensor(numbers).view(2, length)


def _pictures(model: PreTrainedModel) -> Iterator[Tensor]:
    """Two pictures of the size that the configuration names, or as many videos."""
    size = _setting(model, "image_size") or 224
    size = (size, size) if isinstance(size, int) else tuple(size)
    frames, channels = _setting(model, "num_frames"), _setting(model, "num_channels") or 3
    if len(size) != 2:
        return
    if isinstance(frames, int):
        yield torch.zeros(2, frames, channels, *size, dtype=model.dtype)
    yield torch.zeros(2, channels, *size, dtype=model.dtype)


def _sounds(model: PreTrainedModel) -> Iterator[Tensor]:
    """Two sounds: spectra of the sizes that the configuration names, and waves."""
    names = "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim"
    bins = next((size for size in (_setting(model, name) for name in names) if isinstance(size, int)), 80)
    positions, frames = _setting(model, "max_source_positions"), _setting(model, "max_length")
    if isinstance(positions, int):
        yield torch.zeros(2, bins, 2 * positions, dtype=model.dtype)
    if _setting(model, "frequency_stride") and isinstance(frames, int):
        yield torch.zeros(2, frames, bins, dtype=model.dtype)
    # A quarter of a second at 16 kHz: convolutions need some samples for each of their places.
    yield torch.zeros(2, 4000, dtype=model.dtype)
    yield torch.zeros(2, 64, bins, dtype=model.dtype)


def _setting(model: PreTrainedModel, name: str) -> Any:
    """A setting of the configuration, or of that of the part of the model that reads pictures or sounds."""
    config = model.config
    parts = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    return next((value for value in (getattr(part, name, None) for part in parts) if value is not None), None)
