"""The softmax model of a linearized one: its plain folder, and what such a folder does not bring back."""

from __future__ import annotations

from collections.abc import Mapping
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from linattn.hf._implementation import MARK
from linattn.hf._model_records import RECORD, REMEDY, TENSORS, ModelRecord, dtype_named
from linattn.hf.layer_attention import LayerAttention
from linattn.hf.loading import quiet
from linattn.records.json_files import read_json

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
# What makes transformers fetch kernels from a hub, or read other files than those of the folder.
_ELSEWHERE = (
    "attn_implementation",
    "attn_implementation_internal",
    "experts_implementation",
    "experts_implementation_internal",
    "transformers_weights",
    "configuration_files",
)
_HARMLESS = (None, MARK, "eager", "sdpa")
# Bytes between the places where torch's allocator on the CPU begins tensors.
_ALIGNMENT = 64
# Numbers in the buffers of a model, as its masks and frequencies.
_MOST_BUFFERED = 2**26


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
    for name in (_CONFIG, *_weight_files(path)):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name} is missing, and with it the softmax model; {REMEDY}")
    _check_config(path)
    dtype = dtype_named(record.dtype, str(path / RECORD))
    model, info = _loaded(kind, path, dtype)
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    # The model's own save_pretrained writes the kernels among the weights too.
    surplus = info["unexpected_keys"] - record.tensors.keys()
    wrong += [f"{name} is surplus" for name in sorted(surplus)]
    if wrong:
        raise ValueError(f"the weights in {path} are not those of {record.model_class}: {', '.join(wrong)}; {REMEDY}")
    _align(model)
    return model


def _loaded(kind: Any, path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model and what transformers says of the weights, without its own log of the same."""
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    shown = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        with quiet():
            # In place of what config.json names, which was checked, and is none that transformers has.
            config = kind.config_class.from_pretrained(path, local_files_only=True, attn_implementation=None)
            _check_size(kind, config, path)
            model, info = kind.from_pretrained(path, dtype=dtype, attn_implementation=None, **options)
    # Whatever a broken file makes any of its readers raise: the folder is at fault, and named.
    except Exception as error:
        raise ValueError(
            f"{path}: transformers cannot load {kind.__name__} from config.json and the weights there "
            f"({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    finally:
        logging.set_verbosity(shown)
    return model, info


def _check_size(kind: Any, config: Any, path: Path) -> None:
    """Refuse a configuration of a far larger model than the weights are of, before memory is taken for it."""
    with torch.device("meta"):
        model = kind(config)
    wanted = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    held = sum((path / name).stat().st_size for name in _weight_files(path))
    # A number may take half a byte in a file, and a model has buffers that no file holds.
    if wanted > 4 * held + _MOST_BUFFERED:
        raise ValueError(f"config.json describes a model of {wanted} numbers, and the weights are {held} bytes")


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
    return tuple(f"{name}." for name, module in modules if isinstance(module, LayerAttention))


def _align(model: PreTrainedModel) -> None:
    """Move tensors that begin anywhere in a mapped file to where torch begins its own: rounding depends on it."""
    for x in (*model.parameters(), *model.buffers()):
        if x.data_ptr() % _ALIGNMENT:
            x.data = x.data.clone()


def _check_config(path: Path) -> None:
    """Refuse a config.json that sends transformers elsewhere, for code or for weights."""
    place = path / _CONFIG
    if (path / _ADAPTER).exists():
        raise ValueError(f"{path / _ADAPTER} names another folder for the weights; remove it, or {REMEDY}")
    pending = [read_json(place, "configuration", REMEDY)]
    if not isinstance(pending[0], dict):
        raise ValueError(f"{place} is not a configuration: it holds no object; {REMEDY}")
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            for name, value in found.items():
                if name.lstrip("_") in _ELSEWHERE and value not in _HARMLESS:
                    raise ValueError(
                        f"{place}: {name} is {value!r}, which would have transformers take code or files from "
                        f"elsewhere; remove it, or {REMEDY}"
                    )
        if isinstance(found, dict | list):
            pending.extend(found.values() if isinstance(found, dict) else found)


def _weight_files(path: Path) -> list[str]:
    """The names of the files that hold the softmax model's weights."""
    index = path / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    found = read_json(index, "index of weights", REMEDY)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} names no files of weights; {REMEDY}")
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or any(mark in name for mark in ("/", "\\")):
            raise ValueError(f"{index} names {name!r}, which is no file of weights in the same folder; {REMEDY}")
    return sorted(set(weight_map.values()))
