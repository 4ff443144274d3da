"""Plans as JSON: fields checked one by one, tensors to the last bit."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linattn.planning.json_records import check_fields, read_record
from linattn.records.atomic import atomic_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KIND, _VERSION = "linattn plan", 1
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64)}
_REMEDY = "make the plan again, with `linattn audit --target` or linattn.plan"


def write(path: Path, plans: Sequence[DataclassInstance]) -> None:
    """A file of plans, one per layer."""
    layers = [plain(plan) for plan in plans]
    with atomic_file(path) as file:
        json.dump({"kind": _KIND, "version": _VERSION, "layers": layers}, file, allow_nan=False, indent=1)


def read(path: Path, plan: type[DataclassInstance], head: type[DataclassInstance]) -> list[dict[str, Any]]:
    """The layers of a file, checked against the fields of both dataclasses."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no plan {path}; make one with `linattn audit --target` or linattn.plan")
    found = read_record(path, _KIND, _VERSION, _REMEDY)
    layers = found.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"{path} holds no layers; {_REMEDY}")
    return [fields_of(layer, plan, head, f"{path}, layer {number}", _REMEDY) for number, layer in enumerate(layers)]


def fields_of(
    values: Any, plan: type[DataclassInstance], head: type[DataclassInstance], place: str, remedy: str
) -> dict[str, Any]:
    """One layer, its heads and its tensors, as the fields of both dataclasses."""
    checked = check_fields(values, plan, place, remedy)
    heads, fitted = checked["heads"], checked["fitted"]
    if not isinstance(heads, list) or not heads:
        raise ValueError(f"{place}: heads must be a list of at least one head; {remedy}")
    if not isinstance(fitted, dict) or not all(isinstance(tensors, dict) for tensors in fitted.values()):
        raise ValueError(f"{place}: fitted must hold the tensors of each method by name; {remedy}")
    checked["heads"] = [check_fields(one, head, f"{place}, head {number}", remedy) for number, one in enumerate(heads)]
    checked["fitted"] = {
        label: {name: _tensor(tensor, f"{place}, {label}, {name}", remedy) for name, tensor in tensors.items()}
        for label, tensors in fitted.items()
    }
    return checked


def plain(value: Any) -> Any:
    """Dataclasses, tensors and what holds them, as JSON has them."""
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()
        raw = bytes(held.flatten().view(torch.uint8).tolist())
        name = str(held.dtype).removeprefix("torch.")
        return {"dtype": name, "shape": list(held.shape), "base64": base64.b64encode(raw).decode("ascii")}
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def _tensor(value: Any, place: str, remedy: str) -> Tensor:
    """The tensor that `plain` wrote."""
    try:
        dtype, raw = _DTYPES[value["dtype"]], bytearray(base64.b64decode(value["base64"], validate=True))
        flat = torch.frombuffer(raw, dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{place} is no tensor ({error}); {remedy}") from None
