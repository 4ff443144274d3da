"""Fitted tensors of a `LinearLM`'s maps, in its folder: config.json says which there are, the weights hold them, and a
model that is loaded has places for them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from linattn.feature_maps import FittedMap
from linattn.hf._model_records import outlines

_LOADING: ContextVar[bool] = ContextVar("loading", default=False)
# 1 GB in float64: far above what maps hold, and far below what a broken config asks for.
_MOST_NUMBERS = 2**27


@contextmanager
def loading() -> Iterator[None]:
    """While a folder is read: models are built with places for its fitted tensors."""
    token = _LOADING.set(True)
    try:
        yield
    finally:
        _LOADING.reset(token)


def fitted_outlines(model: nn.Module) -> dict[str, Any] | None:
    """Dtype and shape of all fitted tensors by name, as `LinearLMConfig.fitted` has them; None where there are none."""
    parts = ((name, part) for name, part in model.named_modules() if isinstance(part, FittedMap))
    held = {f"{name}.{buffer}": getattr(part, buffer) for name, part in parts for buffer in part.fitted_buffers}
    return outlines({name: x for name, x in held.items() if isinstance(x, Tensor)}) or None


def make_room_(model: nn.Module, outlines: Mapping[str, Any]) -> None:
    """Give a model's maps tensors of these dtypes and shapes, which the weights of a folder then fill.

    Only while a folder is read: elsewhere a map without statistics is to refuse its calls, not to go by placeholders.
    """
    if not _LOADING.get():
        return
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, outline in outlines.items():
        place, _, buffer = name.rpartition(".")
        parts[place][buffer] = _placeholder(name, outline)
    modules = dict(model.named_modules())
    for place, tensors in parts.items():
        part = modules.get(place)
        if not isinstance(part, FittedMap) or not tensors.keys() <= set(part.fitted_buffers):
            raise ValueError(
                f"config.fitted names {', '.join(sorted(tensors))} of {place}, which is no map that has them; give the "
                "config that the weights were saved with"
            )
        part.load_state_dict(tensors, strict=False)


def _placeholder(name: str, outline: Any) -> Tensor:
    """A tensor of an outline, matrices being identities, which can be inverted; or an error that names it."""
    try:
        dtype, shape = getattr(torch, outline["dtype"]), [int(size) for size in outline["shape"]]
        if not dtype.is_floating_point or min(shape, default=0) < 0 or math.prod(shape) > _MOST_NUMBERS:
            raise ValueError
        return torch.ones(shape, dtype=dtype) if len(shape) < 2 else torch.eye(*shape[-2:], dtype=dtype).expand(shape)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"config.fitted says of {name} {outline!r}, wanted a floating dtype and a shape of at most "
            f"{_MOST_NUMBERS} numbers, as save_pretrained writes them"
        ) from None
