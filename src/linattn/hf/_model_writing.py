"""Write a linearized model: what transformers writes of it, and beside that its kernels.

Two ways lead here: `linattn.hf.save_pretrained`, whose folder holds the softmax model and the kernels apart, and the
model's own `save_pretrained`, which trainers call and whose weights are those of its `state_dict`, kernels included.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import linattn
from linattn.hf import _model_records
from linattn.hf._attention_modules import attention_modules
from linattn.hf._layer_records import describe_attention
from linattn.hf._model_records import RECORD, LayerRecord, ModelRecord, outlines
from linattn.hf._softmax_folders import not_brought_back
from linattn.hf.layer_attention import ATTRIBUTE, attention_of

SAVE = "save_pretrained"
"""The method of a model that `SaveWithKernels` takes the place of."""

# Of transformers' options, those whose folder `from_pretrained` would not read.
_REFUSED = {
    "push_to_hub": "save without it, then upload the folder (model.push_to_hub does both)",
    "variant": "save without it, in a folder of its own",
    "distributed_checkpoint": "save without it, which gathers the weights first",
}


class SaveWithKernels:
    """A linearized model's own `save_pretrained`, whose folder `from_pretrained` reads; an object can be pickled."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, *args: Any, **options: Any) -> None:
        """Takes what transformers' own takes, and refuses what would give another kind of folder."""
        model, own = self.model, type(self.model).save_pretrained
        given = inspect.signature(own).bind(model, *args, **options).arguments
        # Of a model with adapters transformers writes the adapters alone: no folder of a model.
        if getattr(model, "_hf_peft_config_loaded", False):
            own(model, *args, **options)
            return
        refused = [f"{name} ({cure})" for name, cure in _REFUSED.items() if given.get(name)]
        if refused:
            raise ValueError(
                f"{type(model).__name__} is linearized, and the folder would hold no kernels with {', '.join(refused)}"
            )
        folder, is_main = Path(given["save_directory"]), given.get("is_main_process", True)
        state = given.get("state_dict") or model.state_dict()
        record, tensors = describe_model(model, state)
        if is_main:
            (folder / RECORD).unlink(missing_ok=True)
        # Copies of the kernels' own, since transformers refuses tensors that share memory, as those of one map for
        # several layers do.
        whole = {name: x.clone() if name in tensors else x for name, x in state.items()}
        rest = {name: x for name, x in given.items() if name not in ("self", "save_directory", "state_dict", "kwargs")}
        own(model, os.fspath(folder), state_dict=whole, **rest, **given.get("kwargs", {}))
        if is_main:
            _model_records.write(folder, record, tensors)


def describe_model(model: PreTrainedModel, state: Mapping[str, Tensor]) -> tuple[ModelRecord, dict[str, Tensor]]:
    """linattn.json and the tensors of linattn.safetensors, those from `state` where it holds them, or an error."""
    kind = type(model)
    if getattr(transformers, kind.__name__, None) is not kind:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is no class that transformers exports, and from_pretrained finds "
            "classes there alone; save a model of transformers' own classes, for example the one inside"
        )
    modules = list(attention_modules(model))
    linear = [(found, each) for found in modules if (each := attention_of(found.module)) is not None]
    layers = tuple(LayerRecord(found.number, found.name, describe_attention(each)) for found, each in linear)
    tensors: dict[str, Tensor] = not_brought_back(model)
    for found, each in linear:
        tensors.update(each.state_dict(prefix=f"{found.name}.{ATTRIBUTE}."))
    tensors = {name: state.get(name, x) for name, x in tensors.items()}
    record = ModelRecord(
        linattn=linattn.__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        model_class=kind.__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(modules),
        layers=layers,
        tensors=outlines(tensors),
    )
    return record, tensors
