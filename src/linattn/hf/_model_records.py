"""linattn.json and linattn.safetensors: what a linearized model is beside its softmax model, read with every check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from linattn.records.fields import Reading, to_json
from linattn.records.json_files import read_record, write_json

RECORD, TENSORS = "linattn.json", "linattn.safetensors"
REMEDY = "save the model again, with linattn.hf.save_pretrained"
_KIND, _VERSION = "linattn model", 1


@dataclass(frozen=True)
class LayerRecord:
    """One linearized layer: number and name of its attention module as in `LayerReport`, and what it attends by."""

    number: int
    module_name: str
    kernel: Any


@dataclass(frozen=True)
class ModelRecord:
    """linattn.json; the first three fields are the versions that wrote it."""

    linattn: str
    torch: str
    transformers: str
    model_class: str
    dtype: str
    num_layers: int  # Those with softmax included, which `layers` leaves out.
    layers: tuple[LayerRecord, ...]
    tensors: Mapping[str, Any]  # `outlines` of linattn.safetensors.


def write(folder: Path, record: ModelRecord, tensors: Mapping[str, Tensor]) -> None:
    """Both files; tensors that share memory are written once each."""
    save_file({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}, folder / TENSORS)
    write_json(folder / RECORD, {"kind": _KIND, "version": _VERSION, **to_json(record)})


def read(folder: Path) -> ModelRecord:
    """linattn.json, its fields checked; kernels and tensors are for others to check."""
    path = folder / RECORD
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, so {folder} holds no linearized model: load it with transformers, and linearize_ it "
            "if that is wanted"
        )
    record = Reading(str(path), REMEDY).record(ModelRecord, read_record(path, _KIND, _VERSION, REMEDY))
    if not record.layers:
        raise ValueError(f"{path}: layers must be a list of at least one layer; {REMEDY}")
    return record


def outlines(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Dtype and shape of tensors, by name, as JSON has them."""
    return {name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)} for name, x in tensors.items()}


def read_tensors(folder: Path, record: ModelRecord) -> dict[str, Tensor]:
    """linattn.safetensors, on the CPU, held against what the record says of it."""
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, and with it the tensors of the kernels; {REMEDY}")
    try:
        found = {name: x.clone() for name, x in load_file(path, device="cpu").items()}
    # The second kind: dtypes that safetensors knows, and its reader for torch does not.
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {REMEDY}") from None
    got, wanted = outlines(found), record.tensors
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - got.keys())]
    wrong += [f"{name} is surplus" for name in sorted(got.keys() - wanted.keys())]
    wrong += [
        f"{name} is {got[name]}, wanted {wanted[name]}"
        for name in sorted(got.keys() & wanted.keys())
        if got[name] != wanted[name]
    ]
    if wrong:
        raise ValueError(f"{path} does not hold what {RECORD} says: {', '.join(wrong)}; {REMEDY}")
    return found


def dtype_named(name: str, place: str) -> torch.dtype:
    """The dtype that torch calls so."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{place}: there is no dtype {name!r}; {REMEDY}")
    return dtype
