"""linattn.json and linattn.safetensors: what a linearized model has beside its softmax model, read with every check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from linattn.attention import Exact
from linattn.attention.exact.rule import RULES
from linattn.hf.layer_attention import ALL_HEADS, LayerAttention
from linattn.planning.map_records import check_size, describe, rebuild
from linattn.planning.methods import parse_method
from linattn.planning.plans import EXACT, Plan, plan_from_record, plan_record
from linattn.records.fields import Reading, to_json
from linattn.records.json_files import read_record, write_json

RECORD, TENSORS = "linattn.json", "linattn.safetensors"
REMEDY = "save the model again, with linattn.hf.save_pretrained"
_KIND, _VERSION = "linattn model", 1
# Keys in a window, keys attended to exactly, numbers in a value: no model has more.
_MOST = 2**20
# Characters of a method's written form.
_LONGEST = 1000


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


def write(folder: Path, record: ModelRecord, tensors: Mapping[str, Tensor]) -> None:
    """Both files; tensors that share memory are written once each."""
    save_file({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}, folder / TENSORS)
    write_json(folder / RECORD, {"kind": _KIND, "version": _VERSION, **to_json(record)})


def read(folder: Path) -> ModelRecord:
    """linattn.json, its fields checked; layers and tensors are for others to check."""
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
        raise FileNotFoundError(f"{path} is missing, and with it the tensors of the linear attention; {REMEDY}")
    try:
        found = {name: x.clone() for name, x in load_file(path, device="cpu").items()}
    # The second kind: dtypes that safetensors knows, and its reader for torch does not.
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {REMEDY}") from None
    got, wanted = outlines(found), record.tensors
    both = sorted(got.keys() & wanted.keys())
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - got.keys())]
    wrong += [f"{name} is surplus" for name in sorted(got.keys() - wanted.keys())]
    wrong += [f"{name} is {got[name]}, wanted {wanted[name]}" for name in both if got[name] != wanted[name]]
    if wrong:
        raise ValueError(f"{path} does not hold what {RECORD} says: {', '.join(wrong)}; {REMEDY}")
    return found


@dataclass(frozen=True)
class _MapRecord:
    """A method for all heads, without a map beside merged keys.

    The rule of its exact part is not written where it is `Exact` itself, nor are merged keys where there are none, nor
    bits where these are whole.
    """

    feature_map: Any
    window: int | None
    num_heavy: int
    rule: str = Exact.word
    num_merged: int = 0
    bits: int | None = None

    @property
    def exact(self) -> Exact | None:
        """The exact part; None where both sizes say that there is none."""
        if self.rule not in RULES:
            raise ValueError(f"there is no exact part {self.rule!r}, but {', '.join(RULES)}")
        sizes = self.window, self.num_heavy, self.num_merged
        return None if sizes == (None, 0, 0) else RULES[self.rule](*sizes, self.bits)


@dataclass(frozen=True)
class _PlanRecord:
    """A plan."""

    plan: Any


def describe_attention(attention: LayerAttention) -> dict[str, Any]:
    """The record of a layer's attention."""
    if attention.plan is not None:
        return vars(_PlanRecord(plan_record(attention.plan)))
    group = attention.groups[ALL_HEADS]
    assert group is not None
    exact = group.exact
    sizes = {"window": exact and exact.window, "num_heavy": exact.num_heavy if exact else 0}
    rule = {} if exact is None or exact.word == Exact.word else {"rule": exact.word}
    merged = {"num_merged": exact.num_merged} if exact is not None and exact.num_merged else {}
    bits = {"bits": exact.bits} if exact is not None and exact.bits else {}
    feature_map = None if attention.feature_map is None else describe(attention.feature_map)
    return {"feature_map": feature_map, **sizes, **rule, **merged, **bits}


def rebuild_attention(record: Any, module_name: str, *, place: str, remedy: str) -> LayerAttention:
    """The attention of a record, as its constructor leaves it; `place` and `remedy` are for errors."""
    reading, is_plan = Reading(place, remedy), isinstance(record, dict) and "plan" in record
    found: Any = reading.record(_PlanRecord if is_plan else _MapRecord, record)
    plan = plan_from_record(found.plan, f"{place}, plan", remedy) if is_plan else None
    try:
        if plan is not None:
            _check_methods(plan)
            return LayerAttention(plan, module_name)
        _check_counts(window=found.window, num_heavy=found.num_heavy, num_merged=found.num_merged)
        if found.feature_map is None and not found.num_merged:
            raise ValueError("feature_map is null and num_merged is missing or 0, so nothing takes the keys")
        feature_map = None if found.feature_map is None else rebuild(found.feature_map)
        return LayerAttention(feature_map, module_name, exact=found.exact)
    # RecursionError, a RuntimeError: a record may hold a map in a map in a map.
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{place}: {error}; {remedy}") from error


def _check_methods(plan: Plan) -> None:
    """Refuse methods that would hold more than any model's, before they are built."""
    _check_counts(value_dim=plan.value_dim)
    for label in plan.groups:
        if len(label) > _LONGEST:
            raise ValueError(f"a method of {len(label)} characters is none of linattn's")
        if label != EXACT:
            method = parse_method(label)
            _check_counts(**(vars(method.exact) if method.exact else {}))
            if method.map is not None:
                check_size(method.map.name, {"head_dim": plan.head_dim, **dict(method.map.options)})


def _check_counts(**counts: int | None) -> None:
    """Refuse sizes beyond any model's."""
    for name, count in counts.items():
        if count is not None and count > _MOST:
            raise ValueError(f"{name} is {count}, which is beyond any model's; at most {_MOST} is read")
