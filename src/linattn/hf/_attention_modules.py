"""Find the modules of a model that compute attention, and what is known of them before the first call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")


@dataclass(frozen=True, eq=False)
class AttentionModule:
    """One attention module of a model: its number, from 0, in the order of the model's modules, and qualified name."""

    number: int
    name: str
    module: nn.Module

    @property
    def head_dim(self) -> int:
        """D, under whichever name the family keeps it."""
        for name in _WIDTHS:
            width = getattr(self.module, name, None)
            if isinstance(width, int):
                return width
        raise ValueError(
            f"{self.name} ({type(self.module).__name__}) has none of the attributes {', '.join(_WIDTHS)}, so that the "
            "width of its heads is not known; leave the layer out of `layers`"
        )

    @property
    def window(self) -> int | None:
        """Width of its sliding window, or None; modules without a word of their own follow the configuration."""
        config = getattr(self.module, "config", None)
        window: int | None = getattr(self.module, "sliding_window", getattr(config, "sliding_window", None))
        return window

    @property
    def is_causal(self) -> bool:
        """True if later keys are hidden, as far as is known before a call."""
        config = getattr(self.module, "config", None)
        return bool(getattr(self.module, "is_causal", False)) and getattr(config, "is_causal", True) is not False

    @property
    def cache_place(self) -> int | None:
        """Its layer's number in the model's cache; None for modules that have none, or whose queries see later keys."""
        place = getattr(self.module, "layer_idx", None)
        return place if self.is_causal and isinstance(place, int) else None


def attention_modules(model: PreTrainedModel) -> Iterator[AttentionModule]:
    """Every module that looks its attention function up, in order."""
    kinds = {type(module) for module in model.modules() if not isinstance(module, PreTrainedModel)}
    attending = {kind for kind in kinds if _looks_attention_up(kind)}
    found = ((name, module) for name, module in model.named_modules() if type(module) in attending)
    for number, (name, module) in enumerate(found):
        yield AttentionModule(number, name, module)


def _looks_attention_up(kind: type[nn.Module]) -> bool:
    """True if a class calls transformers' attention interface; families share no base class that would say so."""
    try:
        return ".get_interface(" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
