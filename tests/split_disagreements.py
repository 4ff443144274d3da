"""Jobs of ranks, one of which makes another call than the others.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from grid import tokens
from layers import HEAD_DIM, linear, softmax
from linattn import parallel
from linattn.feature_maps import FavorPlus, FeatureMap, LearnedExponential
from linattn.nn import Attention
from linattn.parallel import ContextParallel
from linattn.positions import Gates, Rotary

# Tokens of a rank; of the last one, the others' number and one more.
LENGTH = 6
# What the last rank's call has that the others' have not.
CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "scale": {"scale": 2.0},
    "features": {"num_features": 16},
    "class": {"map": "learned"},
    "weights": {"map": "learned", "weight": 0.5},
    "direction": {"is_causal": False},
    "window": {"window": 8},
    "no window": {"window": None},
    "dtype": {"dtype": torch.float32},
    "heads": {"num_heads": 6},
    "groups": {"num_kv_heads": 1},
    "batch": {"batch": 3},
    "value width": {"value_dim": 7},
    "gqa": {"enable_gqa": False},
    "gates": {"gates": True},
    "backend": {"backend": "reference"},
    "gradients": {"follows": True},
    "lengths": {"lengths": True},
    "key_mask": {"masked": True},
    "key_bias": {"biased": True},
    "refusal": {"backend": "quick"},
}


def _map(given: dict[str, Any]) -> FeatureMap:
    """A map of these options."""
    if given["map"] == "learned":
        learned = LearnedExponential(HEAD_DIM, 8).double()
        torch.nn.init.constant_(learned.of_key.weight, given["weight"])
        return learned
    return FavorPlus(HEAD_DIM, given["num_features"], seed=given["seed"], scale=given["scale"])


def _attended(mesh: DeviceMesh, way: str, change: dict[str, Any]) -> Tensor:
    """A rank's rows in a call with these changes."""
    given: dict[str, Any] = {"map": "drawn", "seed": 0, "scale": 1.0, "num_features": 8, "weight": 0.25, "batch": 2}
    given |= {"num_heads": 4, "num_kv_heads": 2, "value_dim": 5, "dtype": torch.float64} | change
    length = LENGTH + (mesh.get_local_rank() == mesh.size() - 1)
    batch, kv = given["batch"], given["num_kv_heads"]
    query = tokens(batch, given["num_heads"], length, HEAD_DIM).to(given["dtype"])
    key = tokens(batch, kv, length, HEAD_DIM, seed=1).to(given["dtype"]).requires_grad_("follows" in given)
    value = tokens(batch, kv, length, given["value_dim"], seed=2).to(given["dtype"])
    feature_map = _map(given)
    if way == "absorb":
        options = {"gates": Gates(-tokens(batch, kv, length).abs())} if "gates" in given else {}
        return parallel.absorb(feature_map, key, value, mesh=mesh, **options).S
    options = {name: given[name] for name in ("window", "enable_gqa", "is_causal", "backend") if name in given}
    options = {"enable_gqa": True, "is_causal": "masked" not in given, "mesh": mesh} | options
    if "masked" in given:
        options["key_mask"] = torch.ones(batch, length, dtype=torch.bool)
    if "biased" in given:
        options["key_bias"] = tokens(batch, 1, length)
    if "gates" in given:
        options["gates"] = Gates(-tokens(batch, kv, length).abs())
    if "lengths" in given:
        options["lengths"] = [length] * mesh.size()
    return parallel.linear_attention(query, key, value, feature_map, **options)


def _told(run: Callable[[], Any]) -> str:
    """What a call is told."""
    try:
        run()
    except ValueError as error:
        return str(error)
    return "nothing"


def call_told(mesh: DeviceMesh, way: str, common: dict[str, Any], change: dict[str, Any]) -> str:
    """What a call is told where the last rank's has a change."""
    is_last = mesh.get_local_rank() == mesh.size() - 1
    return _told(lambda: _attended(mesh, way, common | (change if is_last else {})))


def ways_told(mesh: DeviceMesh, ways: tuple[str, ...]) -> str:
    """What calls are told of which each rank makes another."""
    return _told(lambda: _attended(mesh, ways[mesh.get_local_rank()], {}))


def trained_told(mesh: DeviceMesh) -> list[str]:
    """What two calls by one map are told, the last rank's weights stepped between them."""
    feature_map = LearnedExponential(HEAD_DIM, 8).double()
    qkv = [tokens(1, 1, LENGTH, HEAD_DIM, seed=seed) for seed in range(3)]

    def run() -> Tensor:
        return parallel.linear_attention(*qkv, feature_map, mesh=mesh, is_causal=True)

    first = _told(run)
    if mesh.get_local_rank() == mesh.size() - 1:
        with torch.no_grad():
            feature_map.of_key.weight += 0.5
    return [first, _told(run)]


def compiled_told(mesh: DeviceMesh, change: dict[str, Any]) -> str:
    """What a compiled call is told where the last rank's has a change."""
    torch.compiler.reset()
    given = {"seed": 0, "is_causal": True, "batch": 1} | (change if mesh.get_local_rank() else {})
    feature_map = FavorPlus(HEAD_DIM, 8, seed=given["seed"])
    qkv = [tokens(given["batch"], 1, LENGTH, HEAD_DIM, seed=seed) for seed in range(3)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return parallel.linear_attention(query, key, value, feature_map, mesh=mesh, is_causal=given["is_causal"])

    return _told(lambda: torch.compile(attend, backend="aot_eager", fullgraph=True)(*qkv))


def layer_told(mesh: DeviceMesh, kind: str, fault: str) -> str:
    """What a layer is told that the last rank builds or calls otherwise."""
    is_last = mesh.get_local_rank() == mesh.size() - 1
    options: dict[str, Any] = {"positions": Rotary(HEAD_DIM, require_relative=False)} if kind != "bare" else {}
    options["is_causal"] = not (is_last and fault == "direction")
    seed = int(is_last and fault == "seed")
    layer: Attention = softmax(**options) if kind == "softmax" else linear(FavorPlus(HEAD_DIM, 8, seed=seed), **options)
    how = {"equal_lengths": fault in ("mask", "unequal") or (is_last and fault == "equal")}

    def run() -> None:
        split = parallelize_module(layer.double(), mesh, ContextParallel(**how))
        batch = 3 if is_last and fault == "batch" else 2
        length = LENGTH + (is_last and fault == "unequal")
        x = torch.randn(batch, length, layer.embed_dim, dtype=torch.float64)
        split(x, key_mask=torch.ones(batch, length, dtype=torch.bool) if is_last and fault == "mask" else None)

    return _told(run)
