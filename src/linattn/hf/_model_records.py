"""linattn.json and linattn.safetensors: what a linearized model has beside its softmax model, read with every check."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from linattn.attention.window import check_width
from linattn.hf._attention_modules import MARK
from linattn.hf.layer_attention import LayerAttention
from linattn.kv_cache import MergedKV
from linattn.methods.map_records import describe, rebuild
from linattn.records.json_files import Reading, read_record, to_json, write_json

RECORD, TENSORS = "linattn.json", "linattn.safetensors"
REMEDY = "save the model again, with linattn.hf.save_pretrained"
_KIND, _VERSION = "linattn model", 1
# Keys in a window, keys attended to exactly, numbers in a value: no model has more.
_MOST = 2**20


@dataclass(frozen=True)
class LayerRecord:
    """One linearized layer: number and name of its attention module as in `LayerReport`, and what it attends by."""

    number: int
    module_name: str
    kernel: Any  # `describe_attention` of it, under the name that files of version 1 have.


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


def write(folder: Path, record: ModelRecord, tensors: Mapping[str, Tensor], weights: str) -> None:
    """Both files, and a digest of the weights beside them; tensors that share memory are written once each."""
    copies = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    save_file(copies, folder / TENSORS, metadata={"weights": weights})
    write_json(folder / RECORD, {"kind": _KIND, "version": _VERSION, **to_json(record)})


def read(folder: Path) -> ModelRecord:
    """linattn.json, its fields checked; layers and tensors are for others to check."""
    path = folder / RECORD
    if not path.is_file():
        config = folder / "config.json"
        if config.is_file() and MARK in config.read_text("utf-8"):
            raise FileNotFoundError(
                f"{path} is missing; {REMEDY}, or, if a model around a linearized one was saved, load it with "
                "transformers and attn_implementation='sdpa', linearize_ that part, and load all weights again"
            )
        raise FileNotFoundError(
            f"{path} is missing, so {folder} holds no linearized model: load it with transformers, and linearize_ it"
        )
    record = Reading(str(path), REMEDY).record(ModelRecord, read_record(path, _KIND, _VERSION, REMEDY))
    if not record.layers:
        raise ValueError(f"{path}: layers must be a list of at least one layer; {REMEDY}")
    if planned := [each for each in record.layers if isinstance(each.kernel, dict) and "plan" in each.kernel]:
        names = ", ".join(each.module_name for each in planned)
        raise ValueError(
            f"{path} has a method for each head of {names}, which this version does not read; linearize_ the softmax "
            "model by one method for each layer, or read the folder with a version that has linattn.plan"
        )
    return record


def outlines(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Dtype and shape of tensors, by name, as JSON has them."""
    return {name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)} for name, x in tensors.items()}


def read_tensors(folder: Path, record: ModelRecord) -> dict[str, Tensor]:
    """linattn.safetensors, on the CPU, held against what the record says of it."""
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, and with it the tensors of the linear attention; {REMEDY}")
    try:
        tensors = {name: x.clone() for name, x in load_file(path, device="cpu").items()}
    # The second kind: dtypes that safetensors knows, and its reader for torch does not.
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {REMEDY}") from None
    got, wanted = outlines(tensors), record.tensors
    names = [name for name in sorted(got.keys() | wanted.keys()) if got.get(name) != wanted.get(name)]
    wrong = [f"{name} is {got.get(name, 'missing')}, wanted {wanted.get(name, 'none')}" for name in names]
    if wrong:
        raise ValueError(f"{path} does not hold what {RECORD} says: {', '.join(wrong)}; {REMEDY}")
    return tensors


@dataclass(frozen=True)
class _MapRecord:
    """A map with a window or without, or an encoder's merged keys in their written form."""

    feature_map: Any
    window: int | None
    # Of earlier versions, as far as `merged`.
    num_heavy: int = 0
    rule: str | None = None
    num_merged: int = 0
    bits: int | None = None
    merged: str | None = None

    def attention(self, module_name: str) -> LayerAttention:
        """Build the attention, as its constructor leaves it."""
        if self.num_heavy or self.rule is not None:
            cure = "heavy keys were removed: use 'window W + merged C' without a map, or the window alone"
            raise ValueError(f"got num_heavy={self.num_heavy}, rule={self.rule!r}; {cure}")
        _check_counts(window=self.window, num_merged=self.num_merged)
        if self.num_merged or self.merged is not None:
            if self.feature_map is not None:
                raise ValueError("there are a feature_map and merged keys, of which one takes the keys")
            merged = None if self.merged is None else MergedKV.parse(self.merged)
            merged = merged or MergedKV(self.window, self.num_merged, self.bits, num_sinks=0)
            _check_counts(window=merged.window, num_merged=merged.num_merged)
            return LayerAttention(merged, module_name)
        if self.feature_map is None:
            raise ValueError("feature_map is null and merged is missing, so nothing takes the keys")
        if self.window is not None:
            check_width(self.window)
        return LayerAttention(rebuild(self.feature_map), module_name, window=self.window)


def describe_attention(attention: LayerAttention) -> dict[str, Any]:
    """The record of a layer's attention."""
    merged = attention.merged
    if merged is None:
        assert attention.feature_map is not None
        return {"feature_map": describe(attention.feature_map), "window": attention.window}
    return {"feature_map": None, "window": merged.window, "merged": merged.label}


def rebuild_attention(record: Any, module_name: str, place: str) -> LayerAttention:
    """The attention of a record, as its constructor leaves it; its place is for errors."""
    kernel = Reading(place, REMEDY).record(_MapRecord, record)
    try:
        return kernel.attention(module_name)
    # RecursionError, a RuntimeError: a record may hold a map in a map in a map.
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{place}: {error}; {REMEDY}") from error


def _check_counts(**counts: int | None) -> None:
    """Refuse sizes beyond any model's."""
    for name, count in counts.items():
        if count is not None and count > _MOST:
            raise ValueError(f"{name} is {count}, which is beyond any model's; at most {_MOST} is read")
