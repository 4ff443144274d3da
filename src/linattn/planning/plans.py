"""A plan: which method each head of a layer uses, what is expected of it, and attention by it.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.attention import softmax_attention
from linattn.feature_maps import FeatureMap
from linattn.planning.methods import Method, fit, parse_method
from linattn.records.fields import Reading, to_json
from linattn.records.json_files import read_record, write_json

EXACT = "exact"

_KIND, _VERSION = "linattn plan", 1
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64)}
# Of a head's numbers; costs and errors below would make a method look better than exact attention.
_LEAST = {
    "expected_error": 0.0,
    "next_order_error": 0.0,
    "uniform_error": 0.0,
    "state_numbers": 0,
    "flops_per_token": 0,
}
_REMEDY = "make the plan again, with `linattn audit --target` or linattn.plan"


@dataclass(frozen=True)
class HeadPlan:
    """One query head's method.

    Attributes:
        method: its written form, or "exact" for softmax attention.
        expected_error: relative error of the head's output on the calibration sample; 0 for "exact".
        next_order_error: the same, estimated by the expansion's next order as |this − next| / |next|, which needs no
            exact attention; None for "exact", for order 2 and for other maps.
        uniform_error: relative error of averaging the values, on the same sample.
        state_numbers: numbers kept for the head.
        flops_per_token: operations of the head per token.
    """

    method: str
    expected_error: float
    next_order_error: float | None
    uniform_error: float
    state_numbers: int
    flops_per_token: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The methods of one layer's query heads; made by `linattn.plan`, kept as a file, applied by `attend`.

    Attributes:
        heads: one per query head, in order.
        head_dim: D.
        value_dim: Dv.
        scale: factor of q·k in the exponent.
        is_causal: whether later keys are hidden.
        num_tokens: the length it was made for.
        target_error: the error each head was to meet, or None.
        max_features: the most features a map was to have, or None.
        fitted: the tensors of each method's map, by written form, then by name: for maps that must not learn from the
            call, as those of causal attention. One set for the heads of the method, in order.
    """

    heads: tuple[HeadPlan, ...]
    head_dim: int
    value_dim: int
    scale: float
    is_causal: bool
    num_tokens: int
    target_error: float | None = None
    max_features: int | None = None
    fitted: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Attention with each head's method: heads of one method run together.

        Under grouped queries every query head has a state of its own, since heads of a group may differ in method.

        Cost: the sum of the heads' `flops_per_token`, times L.

        Args:
            query: (B, H, L, D).
            key: (B, Hkv, L, D), H a multiple of Hkv.
            value: (B, Hkv, L, Dv).
            key_mask: (B, L) bool, True = attend, or None.

        Returns:
            (B, H, L, Dv) in the query's dtype.

        Raises:
            ValueError: if the tensors have another number of heads or another width than the plan.

        Example:
            >>> exact = HeadPlan("exact", 0.0, None, 0.5, 10, 20)
            >>> zero, v = torch.zeros(1, 1, 2, 4), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
            >>> Plan((exact,), 4, 1, 0.5, False, 2).attend(zero, zero, v).flatten().tolist()
            [2.0, 2.0]
        """

        def answer(label: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """The heads of one method."""
            if label == EXACT:
                return softmax_attention(q, k, v, key_mask=key_mask, is_causal=self.is_causal, scale=self.scale)
            method, feature_map = self._methods[label]
            feature_map.to(q.device)
            return method.attend(feature_map, q, k, v, key_mask=key_mask, is_causal=self.is_causal)

        return self.distribute(query, key, value, answer)

    def distribute(
        self, query: Tensor, key: Tensor, value: Tensor, answer: Callable[[str, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Each method's heads to a function, and its outputs to their places.

        Cost: a copy of the tensors, keys and values once per query head, and the function's own.

        Args:
            query: (B, H, Lq, D).
            key: (B, Hkv, Lk, D), H a multiple of Hkv.
            value: (B, Hkv, Lk, Dv).
            answer: from a method's written form and the query, key and value of its heads, as many of each, to their
                output (B, heads, Lq, Dv); called once per method.

        Returns:
            (B, H, Lq, Dv) in the query's dtype.

        Raises:
            ValueError: if the tensors have another number of heads or another width than the plan.

        Example:
            >>> heads = tuple(HeadPlan(name, 0.0, None, 0.5, 10, 20) for name in ("exact", "Taylor"))
            >>> x = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
            >>> plan = Plan(heads, 1, 1, 1.0, False, 1)
            >>> plan.distribute(x, x, x, lambda label, q, k, v: -v if label == "exact" else v).flatten().tolist()
            [-1.0, 2.0]
        """
        self._check(query, key, value)
        shared = query.shape[1] // key.shape[1]
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for label, heads in self.groups.items():
            index = torch.tensor(heads, device=query.device)
            found = answer(label, query[:, index], key[:, index // shared], value[:, index // shared])
            out[:, index] = found.to(out.dtype)
        return out

    def build(self) -> dict[str, tuple[Method, FeatureMap]]:
        """Every method but the exact one with a new map, which has its fitted tensors where the plan holds them.

        Returns:
            By written form, in the order of `groups`. Random maps are drawn from seed 0, as they were planned.

        Raises:
            ValueError, RuntimeError: if a method cannot be read or built, or its tensors are not the map's.

        Example:
            >>> list(Plan((HeadPlan("Taylor", 0.0, None, 0.5, 10, 20),), 4, 1, 0.5, False, 2).build())
            ['Taylor']
        """
        found = {}
        for label in self.groups:
            if label != EXACT:
                method = parse_method(label)
                feature_map = method.build(self.head_dim, num_features=None, scale=self.scale, seed=0)
                if label in self.fitted:
                    feature_map.load_state_dict(dict(self.fitted[label]))
                found[label] = method, feature_map
        return found

    def fit(self, query: Tensor, key: Tensor) -> Plan:
        """The same methods with maps that were fitted to sample queries and keys, and learn nothing from a call.

        Cost: the fits.

        Args:
            query: (B, H, L, D).
            key: (B, Hkv, L, D), H a multiple of Hkv.

        Returns:
            A plan whose `fitted` holds every map's tensors.

        Raises:
            ValueError: if the tensors do not fit the plan.

        Example:
            >>> head, q = HeadPlan("Expansion(num_centres=1)", 0.0, None, 0.5, 10, 20), torch.tensor([[[[1.0], [3.0]]]])
            >>> Plan((head,), 1, 1, 1.0, False, 2).fit(q, q).fitted["Expansion(num_centres=1)"]["centres"].tolist()
            [[2.0]]
        """
        self._check(query, key, key[..., :1].expand(*key.shape[:-1], self.value_dim))
        shared, fitted = query.shape[1] // key.shape[1], {}
        for label, (_, feature_map) in replace(self, fitted={}).build().items():
            index = torch.tensor(self.groups[label], device=query.device)
            fit(feature_map.to(query.device), query[:, index], key[:, index // shared])
            fitted[label] = {name: x.detach().clone() for name, x in feature_map.state_dict().items()}
        return replace(self, fitted=fitted)

    @property
    def summary(self) -> str:
        """How many heads have which method, in words: the exact ones first, then the most frequent method."""
        counts = sorted(((label != EXACT, -len(heads), label) for label, heads in self.groups.items()))
        return f"{len(self.heads)} heads: {', '.join(f'{-count} {label}' for _, count, label in counts)}"

    @property
    def groups(self) -> dict[str, list[int]]:
        """The heads of each method, in order."""
        found: dict[str, list[int]] = {}
        for number, head in enumerate(self.heads):
            found.setdefault(head.method, []).append(number)
        return found

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a file; see `write_plans`."""
        write_plans(path, [self])

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file of one layer; see `read_plans`."""
        plans = read_plans(path)
        if len(plans) != 1:
            raise ValueError(f"{path} holds the plans of {len(plans)} layers, wanted one; use read_plans")
        return plans[0]

    @cached_property
    def _methods(self) -> dict[str, tuple[Method, FeatureMap]]:
        """Every method but the exact one with its map."""
        return self.build()

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse tensors the plan was not made for."""
        shapes = [tuple(x.shape) for x in (query, key, value)]
        wanted = (len(self.heads), self.head_dim, self.value_dim)
        if (
            any(len(shape) != 4 for shape in shapes)
            or (query.shape[1], query.shape[-1], value.shape[-1]) != wanted
            or key.shape[1] != value.shape[1]
            or len(self.heads) % key.shape[1]
        ):
            raise ValueError(
                f"the plan is for {wanted[0]} query heads of width {wanted[1]} and values of width {wanted[2]}, got "
                f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}; make one for this layer"
            )


def write_plans(path: str | os.PathLike[str], plans: Sequence[Plan]) -> None:
    """Write the plans of a model's layers as one JSON file, under a temporary name until it is whole.

    Args:
        path: the file, conventionally plan.json; replaced in one step.
        plans: one per layer, in order.

    Raises:
        OSError: if the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "plan.json"
        >>> write_plans(path, [Plan((HeadPlan("exact", 0.0, None, 0.5, 10, 20),), 4, 1, 0.5, False, 2)])
        >>> read_plans(path)[0].heads[0].method
        'exact'
    """
    layers = [plan_record(plan) for plan in plans]
    write_json(Path(path), {"kind": _KIND, "version": _VERSION, "layers": layers})


def read_plans(path: str | os.PathLike[str]) -> list[Plan]:
    """Read what `write_plans` wrote.

    Args:
        path: the file.

    Returns:
        One plan per layer, in order, with every map built once.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no plan, of another version, or names a method that cannot be built.

    Example:
        See `write_plans`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no plan {path}; make one with `linattn audit --target` or linattn.plan")
    layers = read_record(path, _KIND, _VERSION, _REMEDY).get("layers")
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"{path} holds no layers; {_REMEDY}")
    plans = [plan_from_record(layer, f"{path}, layer {number}", _REMEDY) for number, layer in enumerate(layers)]
    for number, plan in enumerate(plans):
        try:
            for label, (_, feature_map) in plan._methods.items():
                # A causal map without centres, or with those of other heads, refuses keys.
                if plan.is_causal:
                    feature_map.key(torch.zeros(1, len(plan.groups[label]), 1, plan.head_dim))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path}, layer {number}: {error}; make the plan again") from error
    return plans


def plan_record(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values, its tensors to the last bit, for a file of another format."""
    record: dict[str, Any] = to_json(plan, default=_tensor_record)
    return record


def plan_from_record(record: Any, place: str, remedy: str) -> Plan:
    """The plan of which `plan_record` made these values, its fields checked; `place` and `remedy` are for errors."""
    reading = Reading(place, remedy, readers={Tensor: _tensor})
    plan = reading.at_least(reading.record(Plan, record), head_dim=1, value_dim=1, num_tokens=1, max_features=1)
    if not plan.heads:
        raise ValueError(f"{place}: heads must be a list of at least one head; {remedy}")
    if plan.scale <= 0 or (plan.target_error is not None and plan.target_error <= 0):
        raise ValueError(
            f"{place}: scale and target_error must be positive, got {plan.scale} and {plan.target_error}; {remedy}"
        )
    for number, head in enumerate(plan.heads):
        Reading(f"{place}, heads[{number}]", remedy).at_least(head, **_LEAST)
    return plan


def _tensor_record(value: Tensor) -> dict[str, Any]:
    """A tensor as JSON has it."""
    held = value.detach().cpu().contiguous()
    raw = bytes(held.flatten().view(torch.uint8).tolist())
    name = str(held.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(held.shape), "base64": base64.b64encode(raw).decode("ascii")}


def _tensor(value: Any) -> Tensor:
    """The tensor that `_tensor_record` wrote."""
    try:
        dtype, raw = _DTYPES[value["dtype"]], bytearray(base64.b64decode(value["base64"], validate=True))
        flat = torch.frombuffer(raw, dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"is no tensor ({error})") from None
