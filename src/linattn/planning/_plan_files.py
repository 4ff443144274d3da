"""Plans as JSON: fields checked one by one, tensors to the last bit."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linattn.planning.files import replacing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KIND, _VERSION = "linattn plan", 1
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64)}
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
}


def write(path: Path, plans: Sequence[DataclassInstance]) -> None:
    """A file of plans, one per layer."""
    layers = [_plain(plan) for plan in plans]
    with replacing(path) as file:
        json.dump({"kind": _KIND, "version": _VERSION, "layers": layers}, file, allow_nan=False, indent=1)


def read(path: Path, plan: type[DataclassInstance], head: type[DataclassInstance]) -> list[dict[str, Any]]:
    """The layers of a file, checked against the fields of both dataclasses."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no plan {path}; make one with `linattn audit --target` or linattn.plan")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a plan: it is no JSON ({error}); make the plan again") from None
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise ValueError(f'{path} is not a plan: it wants "kind": "{_KIND}"; make one with `linattn audit --target`')
    if found.get("version") != _VERSION:
        raise ValueError(f"{path} is a plan of version {found.get('version')!r}, this reads {_VERSION}; make it again")
    layers = found.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"{path} holds no layers; make the plan again")
    return [_layer(layer, plan, head, f"{path}, layer {number}") for number, layer in enumerate(layers)]


def _layer(values: Any, plan: type[DataclassInstance], head: type[DataclassInstance], place: str) -> dict[str, Any]:
    """One layer, its heads and its tensors."""
    checked = _checked(values, plan, place)
    heads, fitted = checked["heads"], checked["fitted"]
    if not isinstance(heads, list) or not heads:
        raise ValueError(f"{place}: heads must be a list of at least one head; make the plan again")
    if not isinstance(fitted, dict) or not all(isinstance(tensors, dict) for tensors in fitted.values()):
        raise ValueError(f"{place}: fitted must hold the tensors of each method by name; make the plan again")
    checked["heads"] = [_checked(one, head, f"{place}, head {number}") for number, one in enumerate(heads)]
    checked["fitted"] = {
        label: {name: _tensor(tensor, f"{place}, {label}, {name}") for name, tensor in tensors.items()}
        for label, tensors in fitted.items()
    }
    return checked


def _checked(values: Any, kind: type[DataclassInstance], place: str) -> dict[str, Any]:
    """The fields of a dataclass, all there and of their types."""
    wanted = {each.name: str(each.type) for each in fields(kind)}
    if not isinstance(values, dict) or set(values) != set(wanted):
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{place}: got {got}, wanted the fields {sorted(wanted)}; make the plan again")
    for name, written in wanted.items():
        value, types = values[name], _TYPES.get(written)
        # In Python, True is an integer; in a plan it is none.
        mixed = isinstance(value, bool) and written != "bool"
        unfit = types is not None and (mixed or not isinstance(value, types))
        if unfit or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{place}: {name} must be a finite {written}, got {value!r}; make the plan again")
    return dict(values)


def _plain(value: Any) -> Any:
    """Dataclasses, tensors and what holds them, as JSON has them."""
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()
        raw = bytes(held.flatten().view(torch.uint8).tolist())
        name = str(held.dtype).removeprefix("torch.")
        return {"dtype": name, "shape": list(held.shape), "base64": base64.b64encode(raw).decode("ascii")}
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _tensor(value: Any, place: str) -> Tensor:
    """The tensor that `_plain` wrote."""
    try:
        dtype, raw = _DTYPES[value["dtype"]], bytearray(base64.b64decode(value["base64"], validate=True))
        flat = torch.frombuffer(raw, dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{place} is no tensor ({error}); make the plan again") from None
