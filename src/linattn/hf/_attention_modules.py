"""Find the modules of a model that compute attention, and switch them to a registered implementation and back."""

import gc
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MARK = "linattn.hf.from_pretrained reads this folder"
"""Attention that a linearized model's config.json names: no other reader has one of that name, and says so."""

# What transformers reads from config.json, and never writes by itself; and what stays where a caller names another.
_WRITTEN, _LINEARIZED = "attn_implementation", "linearized_by_linattn"

Former = tuple[tuple[Any, str | None], ...]
"""Each configuration of a model with the implementation that it named before a switch."""

_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")


@dataclass(frozen=True, eq=False)
class AttentionModule:
    """One attention module of a model, as a pass over the model shows it."""

    number: int  # from 0, in the order of the model's modules
    name: str  # qualified
    module: nn.Module
    width: int | None = None  # of its queries
    device: torch.device | None = None
    reads_another_text: bool = False  # queries of a causal text, keys of another, as in a decoder's cross attention
    has_sinks: bool = False  # calls bring logits of one more key of value 0
    hides_later: bool = False  # its masks are causal, whatever the module says

    @property
    def head_dim(self) -> int:
        """D, as a pass has shown it, or under whichever name the family keeps it; 0 where it is not known."""
        widths = (self.width, *(getattr(self.module, name, None) for name in _WIDTHS))
        return next((width for width in widths if isinstance(width, int)), 0)

    @property
    def window(self) -> int | None:
        """Width of its sliding window, or None; modules without a word of their own follow the configuration."""
        # EXAONE 4 gives all layers the width, and says of each whether it slides.
        if getattr(self.module, "is_sliding", True) is False:
            return None
        holder = self.module if hasattr(self.module, "sliding_window") else getattr(self.module, "config", None)
        window: int | None = getattr(holder, "sliding_window", None)
        return window or None

    @property
    def is_causal(self) -> bool:
        """True if later keys are hidden, as far as is known before a call."""
        config = getattr(self.module, "config", None)
        return bool(getattr(self.module, "is_causal", False)) and getattr(config, "is_causal", True) is not False

    @property
    def cache_place(self) -> int | None:
        """Number of the layer in the model's cache; None for modules without one, or whose queries see later keys."""
        place = getattr(self.module, "layer_idx", None)
        return place if self.is_causal and isinstance(place, int) else None


def inner_model(model: Any) -> Any:
    """The model within a compiled one or an adapted one (PEFT), else the model itself."""
    if hasattr(model, "_orig_mod"):
        return inner_model(model._orig_mod)
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def unwrapped(model: Any) -> PreTrainedModel:
    """`inner_model`, or an error that says what to pass in place of what is no transformers model."""
    inner = inner_model(model)
    if isinstance(inner, PreTrainedModel):
        return inner
    kind = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        cure = "pass model.module, the model within, before it is wrapped"
    elif isinstance(model, nn.Module):
        place = next((name for name, part in model.named_modules() if isinstance(part, PreTrainedModel)), None)
        cure = "load one with transformers" if place is None else f"pass the one within, model.get_submodule({place!r})"
    else:
        cure = "load one with transformers, as AutoModel.from_pretrained(name), and pass that"
    raise TypeError(f"a transformers model is wanted, got {kind}; {cure}")


def attention_modules(model: PreTrainedModel) -> Iterator[AttentionModule]:
    """Every module that looks its attention function up, in order."""
    modules = ((name, module) for name, module in model.named_modules() if not isinstance(module, PreTrainedModel))
    attending = ((name, module) for name, module in modules if _lookup(type(module)) is not None)
    for number, (name, module) in enumerate(attending):
        yield AttentionModule(number, name, module)


@cache
def _source(function: Any) -> str:
    """The source of a function, or nothing where there is none; a file is parsed for it once, not for each cache."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


# `functions.get_interface(self.config._attn_implementation, eager_function)`
_LOOKUP = re.compile(r"(\w+)\.get_interface\(\s*[\w.]+,\s*(\w+)")
_PLAIN: tuple[Any, Any] = ALL_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS["sdpa"]

# Of each class of modules, where it looks its function up and what its file has for eager attention; read before a
# model is called, since no graph can be made of reading it.
_LOOKUPS: dict[type, tuple[Any, Any] | None] = {}


def _lookup(kind: type) -> tuple[Any, Any] | None:
    """Functions by name and an eager one that a class looks its attention up in; None if it looks none up."""
    if kind not in _LOOKUPS:
        lookup = None  # stored at the end: another thread may read it as soon as it is there
        # Families share no base class that would say so; of several forward passes one may call the next.
        for forward in (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)):
            if ".get_interface(" in _source(forward):
                lookup = _PLAIN
                if names := _LOOKUP.search(_source(forward)):
                    scope = inspect.unwrap(forward).__globals__
                    lookup = scope[names[1]], scope[names[2]]
                    break
        _LOOKUPS[kind] = lookup
    return _LOOKUPS[kind]


# What each class attends by where a model was loaded with linattn's implementation.
_DEFAULTS: dict[type, str] = {}


def attention_function(kind: type, implementation: str | None) -> Any:
    """The function that a class of attention modules would look up by the name of an implementation."""
    functions, eager = _lookup(kind) or _PLAIN
    return functions.get_interface(implementation, eager)


class Implementation(str):
    """The name of an attention implementation that stands in another's place, and what that was."""

    former: str | None = None


def put_before(model: PreTrainedModel, name: str) -> None:
    """Make a probed model attend by a registered function that hands calls on to the implementation it has."""
    idle = idle_configs(model, {part.module for part in attention_modules(model) if part.cache_place is not None})
    for part in (x for x in parts_of(model) if id(x.config) in idle and not hasattr(x.config, _LINEARIZED)):
        if part.config._attn_implementation == name:  # it was loaded with it
            part.config._attn_implementation_internal = "sdpa" if part._supports_sdpa else "eager"
    for config in (each for each in _configs(model) if id(each) not in idle):
        # In one step: another thread may be calling the model.
        if (former := config._attn_implementation) != name:
            (implementation := Implementation(name)).former = former
            config._attn_implementation_internal = implementation
            # It attends by softmax, whatever folder it was read from.
            vars(config).pop(_LINEARIZED, None)


@contextmanager
def taken_out(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Undo `put_before`, and a loading by that name, but for a block that fails; shared configurations are refused."""
    former = _named(model)
    try:
        for part in reversed(parts_of(model)):  # inner ones first, whose classes know what they can
            for config in _configs(part):
                if (implementation := config._attn_implementation) == name:
                    _refuse_configuration(type(model), vars(config).get(_WRITTEN) == MARK)
                    default = "sdpa" if part._supports_sdpa else "eager"
                    config._attn_implementation_internal = getattr(implementation, "former", default)
        yield
    except BaseException:
        restore(former)
        raise


def former_of(module: nn.Module) -> str | None:
    """Name of the attention implementation before `put_before`; the class's default where it was loaded with ours."""
    config: Any = module.config
    name, kind = config._attn_implementation, type(getattr(module, "behind", module))
    _refuse_configuration(kind, hasattr(config, _LINEARIZED))
    if isinstance(name, Implementation):
        return name.former
    if kind not in _DEFAULTS:
        names = vars(sys.modules[kind.__module__]).values()
        models = [each for each in names if isinstance(each, type) and issubclass(each, PreTrainedModel)]
        local_models = [model for model in models if model.__module__ == kind.__module__]
        _DEFAULTS[kind] = "sdpa" if all(model._supports_sdpa for model in local_models) else "eager"
    return _DEFAULTS[kind]


def _refuse_configuration(kind: type, is_linearized: bool) -> None:
    """Refuse the configuration of a linearized model in one that has none of its linear attention."""
    if is_linearized:
        raise ValueError(
            f"{kind.__name__} has its configuration in common with a linearized model, or a copy of it, or one that "
            "was read from its folder, and attends by softmax; read the folder with linattn.hf.from_pretrained, or, "
            'for softmax, with attn_implementation="sdpa"; where it is built here, build it from a copy, '
            "copy.deepcopy(config), and call its set_attn_implementation('sdpa')"
        )


def switch_to(model: PreTrainedModel, name: str) -> Former:
    """Make every part of a model attend by a registered function, or leave the model as it was and raise."""
    former = _named(model)
    try:
        model.set_attn_implementation(name)
        # Where a part keeps its own attention, transformers only logs a warning.
        deaf = sorted({type(part).__name__ for part in parts_of(model) if part.config._attn_implementation != name})
        if deaf:
            raise ValueError(
                f"{', '.join(deaf)} does not take its attention from transformers' AttentionInterface, so that it "
                "cannot be replaced; choose a model that does (BERT, ModernBERT, GPT-2, Llama, Qwen and most newer)"
            )
    except BaseException:
        restore(former)
        raise
    return former


def restore(former: Former) -> None:
    """Undo `switch_to`."""
    for config, implementation in former:
        config._attn_implementation_internal = implementation


def _named(model: PreTrainedModel) -> Former:
    """Every configuration of a model with the implementation that it names."""
    return tuple({id(config): (config, config._attn_implementation_internal) for config in _configs(model)}.values())


def implementations(model: PreTrainedModel) -> list[tuple[Any, str | None]]:
    """Every configuration and module of a model, and the attention implementation that it names, or its model's."""
    configs = {id(named[0]): named for named in _named(model)}
    named = ((module, id(getattr(module, "config", model.config))) for module in model.modules())
    root = configs[id(model.config)]
    return [*configs.values(), *((module, configs.get(place, root)[1]) for module, place in named)]


def attributes_beside(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Attributes of a model's modules, and of others that have a configuration in common with it, as a decoder's."""
    yield from map(vars, model.modules())
    configs = {id(config): config for config in _configs(model)}
    for holder in gc.get_referrers(*configs.values()):
        attributes = vars(holder) if isinstance(holder, nn.Module) else holder
        if isinstance(attributes, dict) and "_modules" in attributes and id(attributes.get("config")) in configs:
            yield attributes


def mark(model: PreTrainedModel, idle: Collection[int]) -> None:
    """Make every config.json of the model, or of a part that is not idle, name another attention than softmax."""
    for config in _configs(model):
        if id(config) not in idle and vars(config).get(_WRITTEN, MARK) == MARK:
            vars(config).update({_WRITTEN: MARK, _LINEARIZED: True})


def unmark(model: PreTrainedModel) -> None:
    """Undo `mark`."""
    for config in _configs(model):
        if vars(config).get(_WRITTEN) == MARK:
            delattr(config, _WRITTEN)
        vars(config).pop(_LINEARIZED, None)


def idle_configs(model: PreTrainedModel, modules: Collection[nn.Module]) -> set[int]:
    """Identities of configurations of parts without these modules, as towers for sounds, which read their own masks."""
    holds = {part: any(module in modules for module in part.modules()) for part in parts_of(model)}
    return {id(part.config) for part in holds if not holds[part]} - {id(part.config) for part in holds if holds[part]}


def parts_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models within a model, itself included."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Every configuration that names an attention implementation for some part of the model."""
    pending = [part.config for part in parts_of(model)]
    while pending:
        config = pending.pop()
        yield config
        parts = (getattr(config, name) for name in config.sub_configs)
        pending.extend(part for part in parts if part is not None)
