"""The folder of a linearized model: its softmax model, and beside that the records of its attention.

`linattn.hf.save_pretrained` writes the weights of the softmax model and of its linear attention apart; the model's own
`save_pretrained`, which trainers call, writes its whole `state_dict`, and the records beside it.
"""

import inspect
import os
from collections.abc import Mapping
from copy import deepcopy
from hashlib import sha256
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

import linattn
from linattn.hf import _model_records
from linattn.hf._attention_modules import MARK, attention_modules
from linattn.hf._model_records import RECORD, REMEDY, TENSORS, LayerRecord, ModelRecord, describe_attention, outlines
from linattn.hf.layer_attention import ATTRIBUTE, LayerAttention, attention_of
from linattn.hf.loading import quiet
from linattn.records.json_files import read_json

# Of transformers' options, those whose folder `from_pretrained` would not read.
_REFUSED = {
    "push_to_hub": "save without it, then upload the folder (model.push_to_hub does both)",
    "variant": "save without it, in a folder of its own",
    "distributed_checkpoint": "save without it, which gathers the weights first",
}
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
# What makes transformers fetch code from a hub, or read other files than those of the folder.
_ELSEWHERE = ("attn_implementation", "experts_implementation", "transformers_weights", "configuration_files")
_HARMLESS = (None, MARK, "eager", "sdpa")
# Bytes between the places where torch's allocator on the CPU begins tensors.
_ALIGNMENT = 64
# Numbers in the buffers of a model, as its masks and frequencies.
_MOST_BUFFERED = 2**26


def save_linearized(model: PreTrainedModel, *args: Any, **options: Any) -> None:
    """A linearized model's own `save_pretrained`: options that would give another kind of folder are refused."""
    arguments = inspect.signature(PreTrainedModel.save_pretrained).bind(model, *args, **options).arguments
    # Of a model with adapters transformers writes the adapters alone: no folder of a model.
    if getattr(model, "_hf_peft_config_loaded", False):
        type(model).save_pretrained(model, *args, **options)
        return
    if refused := [f"{name} ({cure})" for name, cure in _REFUSED.items() if arguments.get(name)]:
        raise ValueError(f"no folder has the linear attention of {type(model).__name__} with {', '.join(refused)}")
    arguments.update(arguments.pop("kwargs", {}))
    model, folder, state = (arguments.pop(name, None) for name in ("self", "save_directory", "state_dict"))
    write_files(model, Path(folder), state or model.state_dict(), **arguments)


def write_files(model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor] | None, **options: Any) -> None:
    """The files of a linearized model, checked first; without a `state` linear attention's weights are apart."""
    is_main = options.get("is_main_process", True)
    # Of other ranks nothing is written, and they may hold any part.
    _check_weights(model, state or {} if is_main else {})
    record, tensors = describe_model(model, state or {})
    # What was there before is no linearized model from now on, and what is written is one from the last file on.
    for name in (RECORD, _INDEX) if is_main else ():
        (folder / name).unlink(missing_ok=True)
    if state is None:
        weights = softmax_state(model)
    else:
        # Copied, since transformers refuses tensors that share memory, as those of one map for several layers do.
        weights = {name: x.clone() if name in tensors else x for name, x in state.items()}
    type(model).save_pretrained(model, os.fspath(folder), state_dict=weights, **options)
    if is_main:
        # Transformers reads one file before shards, and leaves it beside new ones.
        if (folder / _INDEX).is_file():
            (folder / _WEIGHTS).unlink(missing_ok=True)
        _model_records.write(folder, record, tensors, _digest(folder))


def describe_model(model: PreTrainedModel, state: Mapping[str, Tensor]) -> tuple[ModelRecord, dict[str, Tensor]]:
    """linattn.json and the tensors of linattn.safetensors, those from `state` where it holds them, or an error."""
    kind = type(model)
    if getattr(transformers, kind.__name__, None) is not kind:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is no class that transformers exports, and from_pretrained finds "
            "classes there alone; save a model of transformers' own classes, for example the one inside"
        )
    modules = list(attention_modules(model))
    layers, tensors = [], not_brought_back(model)
    for part in modules:
        if (attention := attention_of(part.module)) is not None:
            layers.append(LayerRecord(part.number, part.name, describe_attention(attention)))
            tensors |= attention.state_dict(prefix=f"{part.name}.{ATTRIBUTE}.")
    tensors = {name: state.get(name, x) for name, x in tensors.items()}
    # Offloading leaves tensors without numbers behind; transformers itself brings those that its own offloading left.
    is_brought = not {"cpu", "disk"}.isdisjoint(getattr(model, "hf_device_map", {}).values())
    written = tensors if is_brought else {**softmax_state(model), **state, **tensors}
    if absent := [name for name, x in written.items() if x.is_meta]:
        raise ValueError(
            f"{absent[0]} and {len(absent) - 1} more tensors of {kind.__name__} are on the meta device, as "
            "accelerate offloads them; call accelerate.hooks.remove_hook_from_submodules(model), which brings them back"
        )
    versions = linattn.__version__, torch.__version__, transformers.__version__
    name, dtype = kind.__name__, str(model.dtype).removeprefix("torch.")
    return ModelRecord(*versions, name, dtype, len(modules), tuple(layers), outlines(tensors)), tensors


def _check_weights(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Refuse weights, of a `state` if there is one, that the model's class does not make of its configuration."""
    config = deepcopy(model.config)
    # Some classes choose modules by its name (SAM), and know none of ours.
    config._attn_implementation = "eager"
    with torch.device("meta"):
        names = set(type(model)(config).state_dict())
    weights = model.state_dict()
    names, held = names | (weights.keys() - softmax_state(model).keys()), (state or weights).keys()
    # A reader ties weights again.
    if differing := sorted((names ^ held) - model.all_tied_weights_keys.keys()):
        cure = "build it as its class does, or save the model that it is a part of"
        if held - names:
            cure = "merge adapters into it first (PEFT: merge_and_unload(), then save what that returns)"
        if state:
            cure = "give state_dict=model.state_dict() with nothing left out or added, or no state_dict; else, " + cure
        raise ValueError(
            f"the weights of {type(model).__name__} are not those of its configuration ({differing[0]!r} and "
            f"{len(differing) - 1} more differ), and no reader of a folder would find their place; {cure}"
        )


def softmax_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's `state_dict` without the tensors of its linear attention."""
    linear = _linear_prefixes(model)
    return {name: x for name, x in model.state_dict().items() if not name.startswith(linear)}


def not_brought_back(model: PreTrainedModel) -> dict[str, Tensor]:
    """Floating tensors outside linear attention that transformers computes anew when it loads a model, or casts."""
    linear, saved = _linear_prefixes(model), softmax_state(model)
    return {
        name: x
        for name, x in (*model.named_parameters(), *model.named_buffers())
        if x.is_floating_point() and not name.startswith(linear) and (name not in saved or x.dtype != model.dtype)
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
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{path / RECORD}: there is no dtype {record.dtype!r}; {REMEDY}")
    model, info = _loaded(kind, path, dtype)
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    # The model's own save_pretrained writes the attention's tensors among the weights too.
    wrong += [f"{name} is surplus" for name in sorted(info["unexpected_keys"] - record.tensors.keys())]
    if wrong:
        raise ValueError(f"the weights in {path} are not those of {record.model_class}: {', '.join(wrong)}; {REMEDY}")
    with safe_open(path / TENSORS, "pt") as file:
        digest = (file.metadata() or {}).get("weights")  # None of earlier versions.
    if digest is not None and (MARK not in (path / _CONFIG).read_text("utf-8") or digest != _digest(path)):
        raise ValueError(
            f"{path}: {RECORD} was written beside other files, and config.json or the weights since, as when a softmax "
            f"model is saved to the same folder; remove {RECORD} and {TENSORS} to load that, or {REMEDY}"
        )
    # Tensors may begin anywhere in a mapped file; moved to where torch begins its own, since rounding depends on it.
    for x in (*model.parameters(), *model.buffers()):
        if x.data_ptr() % _ALIGNMENT:
            x.data = x.data.clone()
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
            with torch.device("meta"):
                described = kind(config)
            wanted = sum(x.numel() for x in (*described.parameters(), *described.buffers()))
            held = sum((path / name).stat().st_size for name in _weight_files(path))
            # No memory is taken for far more numbers: one may take half a byte in a file, and buffers are in none.
            if wanted > 4 * held + _MOST_BUFFERED:
                raise ValueError(f"config.json describes a model of {wanted} numbers, and the weights are {held} bytes")
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


def bring_back(model: PreTrainedModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Give the model what a plain folder does not bring back: all tensors but those of linear attention."""
    held: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if unknown := sorted(tensors.keys() - held.keys()):
        raise ValueError(
            f"{path / TENSORS}: {', '.join(unknown)} belong to no linear attention and no part "
            f"of {type(model).__name__}; {REMEDY}"
        )
    for name, x in tensors.items():
        if held[name].shape != x.shape:
            raise ValueError(
                f"{path / TENSORS}: {name} is {tuple(x.shape)}, {type(model).__name__} wants "
                f"{tuple(held[name].shape)}; {REMEDY}"
            )
        held[name].data = x


def _linear_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Prefixes of the names of all tensors of linear attention, under every name a module has."""
    modules = model.named_modules(remove_duplicate=False)
    return tuple(f"{name}." for name, module in modules if isinstance(module, LayerAttention))


def _check_config(path: Path) -> None:
    """Refuse a config.json that sends transformers elsewhere, for code or for weights."""
    place = path / _CONFIG
    if (path / _ADAPTER).exists():
        raise ValueError(f"{path / _ADAPTER} names another folder for the weights; remove it, or {REMEDY}")
    config = read_json(place, "configuration", REMEDY)
    if not isinstance(config, dict):
        raise ValueError(f"{place} is not a configuration: it holds no object; {REMEDY}")
    pending: list[Any] = [config]
    while pending:
        part = pending.pop()
        for name, value in part.items() if isinstance(part, dict) else ():
            if name.lstrip("_").removesuffix("_internal") in _ELSEWHERE and value not in _HARMLESS:
                raise ValueError(
                    f"{place}: {name} is {value!r}, which would have transformers take code or files from elsewhere; "
                    f"remove it, or {REMEDY}"
                )
        if isinstance(part, dict | list):
            pending.extend(part.values() if isinstance(part, dict) else part)


def _digest(path: Path) -> str:
    """SHA-256 of the softmax model's weights, in however many files they are."""
    hashes: dict[str, bytes] = {}
    for name in _weight_files(path):
        # One tensor at a time: a second copy of all may not fit in memory.
        with safe_open(path / name, "pt") as file:
            tensors = ((key, file.get_tensor(key).reshape(-1).view(torch.uint8)) for key in sorted(file.keys()))
            hashes |= {key: sha256(x.numpy()).digest() for key, x in tensors}
    return sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def _weight_files(path: Path) -> list[str]:
    """The names of the files that hold the softmax model's weights."""
    index = path / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    content = read_json(index, "index of weights", REMEDY)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} names no files of weights; {REMEDY}")
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or any(mark in name for mark in ("/", "\\")):
            raise ValueError(f"{index} names {name!r}, which is no file of weights in the same folder; {REMEDY}")
    return sorted(set(weight_map.values()))
