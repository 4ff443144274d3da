"""Switch a model to a registered attention implementation, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

MARK = "linattn.hf.from_pretrained reads this folder"
"""What a linearized model's config.json names as its attention: no other reader has one of that name, and says so."""

# What transformers reads from config.json, and never writes by itself.
_WRITTEN = "attn_implementation"


Former = tuple[tuple[Any, str | None], ...]
"""Each configuration of a model with the implementation that it named before a switch."""


def switch_to(model: PreTrainedModel, name: str) -> Former:
    """Make every part of a model attend by a registered function, or leave the model as it was and raise."""
    configs = {id(config): config for config in _configs(model)}.values()
    former = tuple((config, config._attn_implementation_internal) for config in configs)
    try:
        model.set_attn_implementation(name)
        _check_taken(model, name)
    except BaseException:
        restore(former)
        raise
    return former


def restore(former: Former) -> None:
    """Undo `switch_to`."""
    for config, implementation in former:
        config._attn_implementation_internal = implementation


def attends_by(model: PreTrainedModel, name: str) -> bool:
    """True if some part of the model names this implementation."""
    return any(config._attn_implementation == name for config in _configs(model))


def mark(model: PreTrainedModel) -> None:
    """Make every config.json that is written of the model, or of a part of it, name another attention than softmax."""
    for config in _configs(model):
        if _WRITTEN not in vars(config):
            setattr(config, _WRITTEN, MARK)


def unmark(model: PreTrainedModel) -> None:
    """Undo `mark`."""
    for config in _configs(model):
        if vars(config).get(_WRITTEN) == MARK:
            delattr(config, _WRITTEN)


def hook_parts(model: PreTrainedModel, hook: Callable[[Any, Any, dict[str, Any]], None]) -> list[RemovableHandle]:
    """Call a function before every part of a model that may be called by itself."""
    return [part.register_forward_pre_hook(hook, with_kwargs=True) for part in _parts(model)]


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models within a model, itself included."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Every configuration that names an attention implementation for some part of the model."""
    pending = [part.config for part in _parts(model)]
    while pending:
        config = pending.pop()
        yield config
        parts = (getattr(config, name) for name in config.sub_configs)
        pending.extend(part for part in parts if part is not None)


def _check_taken(model: PreTrainedModel, name: str) -> None:
    """Refuse models some part of which kept its own attention: transformers only logs a warning."""
    deaf = sorted({type(part).__name__ for part in _parts(model) if part.config._attn_implementation != name})
    if deaf:
        raise ValueError(
            f"{', '.join(deaf)} does not take its attention from transformers' AttentionInterface, so that it "
            "cannot be replaced; choose a model that does (BERT, ModernBERT, GPT-2, Llama, Qwen and most newer ones)"
        )
