"""The softmax model of a linearized one: its plain folder, and what such a folder does not bring back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from linattn.hf._kernels import Kernel
from linattn.hf._model_records import RECORD, REMEDY, TENSORS, ModelRecord, dtype_named
from linattn.hf.loading import quiet

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes between the places where torch's allocator on the CPU begins tensors.
_ALIGNMENT = 64


def softmax_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's `state_dict` without the kernels."""
    kernels = _in_kernels(model)
    return {name: x for name, x in model.state_dict().items() if not name.startswith(kernels)}


def not_brought_back(model: PreTrainedModel) -> dict[str, Tensor]:
    """Floating tensors outside the kernels that transformers computes anew when it loads a model, or casts."""
    kernels, saved = _in_kernels(model), softmax_state(model)
    return {
        name: x
        for name, x in (*model.named_parameters(), *model.named_buffers())
        if x.is_floating_point() and not name.startswith(kernels) and (name not in saved or x.dtype != model.dtype)
    }


def softmax_model(path: Path, record: ModelRecord) -> PreTrainedModel:
    """The model as transformers loads it, refused where a weight is missing or surplus."""
    kind = getattr(transformers, record.model_class, None)
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
        raise ValueError(
            f"{path / RECORD}: transformers {transformers.__version__} has no model {record.model_class!r}, and the "
            f"folder was written with {record.transformers}; install that version"
        )
    for name in ("config.json", *_weight_files(path)):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name} is missing, and with it the softmax model; {REMEDY}")
    dtype = dtype_named(record.dtype, str(path / RECORD))
    with quiet():
        reader: Any = kind
        model, info = reader.from_pretrained(path, local_files_only=True, dtype=dtype, output_loading_info=True)
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [f"{name} is surplus" for name in sorted(info["unexpected_keys"])]
    if wrong:
        raise ValueError(f"the weights in {path} are not those of {record.model_class}: {', '.join(wrong)}; {REMEDY}")
    loaded: PreTrainedModel = model
    _align(loaded)
    return loaded


def bring_back(model: PreTrainedModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Give the model what a plain folder does not bring back: all that no kernel took."""
    held: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    unknown = sorted(tensors.keys() - held.keys())
    if unknown:
        raise ValueError(
            f"{path / TENSORS}: {', '.join(unknown)} belong to no kernel and no part of "
            f"{type(model).__name__}; {REMEDY}"
        )
    for name, x in tensors.items():
        if held[name].shape != x.shape:
            raise ValueError(
                f"{path / TENSORS}: {name} is {tuple(x.shape)}, {type(model).__name__} wants "
                f"{tuple(held[name].shape)}; {REMEDY}"
            )
        held[name].data = x


def _in_kernels(model: PreTrainedModel) -> tuple[str, ...]:
    """What the names of all kernels' tensors begin with, under every name a module has."""
    modules = model.named_modules(remove_duplicate=False)
    return tuple(f"{name}." for name, module in modules if isinstance(module, Kernel))


def _align(model: PreTrainedModel) -> None:
    """Move tensors that begin anywhere in a mapped file to where torch begins its own: rounding depends on it."""
    for x in (*model.parameters(), *model.buffers()):
        if x.data_ptr() % _ALIGNMENT:
            x.data = x.data.clone()


def _weight_files(path: Path) -> list[str]:
    """The names of the files that hold the softmax model's weights."""
    index = path / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{index} names no files of weights ({error!r}); {REMEDY}") from None
