"""A plan: which method each head of a layer uses, what is expected of it, and attention by it.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from linattn.attention import softmax_attention
from linattn.feature_maps import FeatureMap
from linattn.planning import _plan_files
from linattn.planning.methods import Method, parse_method

EXACT = "exact"


@dataclass(frozen=True)
class HeadPlan:
    """One query head's method.

    Attributes:
        method: its written form, or "exact" for softmax attention.
        expected_error: relative error of the head's output on the calibration sample; 0 for "exact".
        next_order_error: the same as the expansion's next order foretells it, |this − next| / |next|, which needs no
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
        fitted: the fitted tensors of each method's map, by written form, then by name: for causal attention, whose maps
            must not learn from the call. One set for the heads of the method, in order.
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

        Source: `linattn.linear_attention`, `linattn.softmax_attention`.
        """
        self._check(query, key, value)
        shared = query.shape[1] // key.shape[1]
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for label, heads in self.groups.items():
            index = torch.tensor(heads, device=query.device)
            q, k, v = query[:, index], key[:, index // shared], value[:, index // shared]
            if label == EXACT:
                found = softmax_attention(q, k, v, key_mask=key_mask, is_causal=self.is_causal, scale=self.scale)
            else:
                method, feature_map = self._methods[label]
                feature_map.to(query.device)
                found = method.attend(feature_map, q, k, v, key_mask=key_mask, is_causal=self.is_causal)
            out[:, index] = found
        return out

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
        found = {}
        for label in self.groups:
            if label != EXACT:
                method = parse_method(label)
                feature_map = method.build(self.head_dim, num_features=None, scale=self.scale, seed=0)
                if label in self.fitted:
                    feature_map.load_state_dict(dict(self.fitted[label]))
                found[label] = method, feature_map
        return found

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

    Cost: linear in the fitted tensors, which are kept to the last bit.

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

    Source: none, a format.
    """
    _plan_files.write(Path(path), plans)


def read_plans(path: str | os.PathLike[str]) -> list[Plan]:
    """Read what `write_plans` wrote.

    Cost: linear in the file.

    Args:
        path: the file.

    Returns:
        One plan per layer, in order, with every map built once.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no plan, of another version, or names a method that cannot be built.

    Example:
        See `write_plans`.

    Source: none, a format.
    """
    plans = []
    for number, layer in enumerate(_plan_files.read(Path(path), Plan, HeadPlan)):
        found = Plan(**{**layer, "heads": tuple(HeadPlan(**head) for head in layer["heads"])})
        try:
            for method, feature_map in found._methods.values():
                _check_fitted(method, feature_map, found)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path}, layer {number}: {error}; make the plan again") from error
        plans.append(found)
    return plans


def _check_fitted(method: Method, feature_map: FeatureMap, plan: Plan) -> None:
    """Refuse a causal plan without the centres that its maps need, or with those of other heads."""
    if plan.is_causal:
        heads = len(plan.groups[method.label])
        feature_map.key(torch.zeros(1, heads, 1, plan.head_dim))
