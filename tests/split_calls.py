"""Jobs of ranks: calls of attention on parts of a sequence, held against the whole call.

Every rank has the whole sequence, takes its part, and returns how far its rows and gradients are from the whole's.
Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.distributed.tensor.experimental._attention import _cp_options as context_parallel_options
from torch.utils._python_dispatch import TorchDispatchMode

import linattn
from grid import build, qkv, tokens, total
from linattn import parallel
from linattn.feature_maps import FeatureMap
from linattn.positions import Gates, gated_attention_with_state

LENGTH = 37
# Even and uneven parts, some of them shorter than a window, and empty ones at any place.
LENGTHS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((18, 19), (37, 0), (0, 37), (5, 32)),
    3: ((12, 12, 13), (20, 0, 17), (1, 2, 34)),
    4: ((9, 9, 9, 10), (0, 30, 3, 4), (16, 1, 0, 20)),
}


@dataclass(frozen=True)
class Whole:
    """A call, as one process makes it."""

    map_name: str
    is_causal: bool = True
    weights: str = "none"  # "mask", "bias", "gates" or "input gates"
    window: int | None = None
    backend: str = "auto"
    value_dim: int = 5
    dtype: torch.dtype = torch.float64  # of the parts; one process has the same numbers in float64
    followed: str | None = None  # the one sequence that gradients follow, beside the map's weights; None for all

    def map(self, dtype: torch.dtype = torch.float64) -> FeatureMap:
        """Its map."""
        return build(self.map_name).to(dtype)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What has a sequence, followed by gradients or not; masked keys hold NaN."""
        query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH, value_dim=self.value_dim)
        found = {"query": query, "key": key, "value": value}
        mask = (torch.arange(2 * LENGTH) * 7 % 11 < 8).view(2, LENGTH)
        rest = {}
        if self.weights == "mask" or self.weights == "input gates":
            rest["key_mask"] = mask
            found["key"], found["value"] = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (key, value))
        if self.weights == "bias":
            found["key_bias"] = tokens(2, 2, LENGTH, seed=5)
        if "gates" in self.weights:
            found["log_forget"] = -tokens(2, 2, LENGTH, seed=6).abs()
        if self.weights == "input gates":
            found["log_input"] = tokens(2, 2, LENGTH, seed=7)
        return {name: x.to(self.dtype).double() for name, x in found.items()}, rest

    def grad(self) -> Tensor:
        """The rows' gradient."""
        return tokens(2, 4, LENGTH, self.value_dim, seed=9)


def _at(name: str, x: Tensor, part: slice) -> Tensor:
    """A part of the tokens."""
    return x[:, part] if name == "key_mask" else x[:, :, part]


def _taken(given: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors as arguments."""
    found: dict[str, Any] = dict(given)
    if "log_forget" in found:
        found["gates"] = Gates(found.pop("log_forget"), found.pop("log_input", None))
    return found


def _whole_out(call: Whole, given: dict[str, Tensor], feature_map: FeatureMap) -> Tensor:
    """One process's rows."""
    options = _taken(given)
    query, key, value = (options.pop(name) for name in ("query", "key", "value"))
    common = {"enable_gqa": True, "window": call.window, "backend": call.backend}
    if "gates" in options:
        return gated_attention_with_state(query, key, value, feature_map, options.pop("gates"), **options, **common).out
    return linattn.linear_attention(query, key, value, feature_map, is_causal=call.is_causal, **options, **common)


def _part_out(call: Whole, given: dict[str, Tensor], feature_map: FeatureMap, mesh: DeviceMesh) -> Tensor:
    """A rank's rows."""
    options = _taken(given)
    tokens = (options.pop(name) for name in ("query", "key", "value"))
    common = {"enable_gqa": True, "window": call.window, "backend": call.backend}
    return parallel.linear_attention(*tokens, feature_map, mesh=mesh, is_causal=call.is_causal, **options, **common)


@cache
def _truth(call: Whole) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One process's rows, and the gradients of what has a sequence and of the map's weights: the same for all parts."""
    feature_map, (followed, rest) = call.map(), call.tensors()
    weights = [x for x in feature_map.parameters() if x.requires_grad]
    followed = {name: x.requires_grad_() for name, x in followed.items()}
    out = _whole_out(call, followed | rest, feature_map)
    return out.detach(), torch.autograd.grad(out, [*followed.values(), *weights], call.grad())


def own_part(mesh: DeviceMesh, lengths: tuple[int, ...]) -> slice:
    """Which tokens a rank holds."""
    rank = mesh.get_local_rank()
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def difference(found: Tensor, truth: Tensor) -> float:
    """The largest, relative to the largest number of the truth; 1 where there are none and should be some."""
    if found.shape != truth.shape:
        return torch.inf
    if not truth.numel():
        return 0.0
    worst = (found - truth).detach().abs().max() / truth.detach().abs().max().clamp(min=1)
    return float(worst.nan_to_num(torch.inf))


def summed(tensors: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Sums over all ranks of a mesh, of tensors of one dtype: one all-reduce for each dimension of the mesh."""
    flat = torch.cat([x.detach().flatten() for x in tensors])
    for group in mesh.get_all_groups():
        dist.all_reduce(flat, group=group)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def errors(mesh: DeviceMesh, call: Whole, lengths: tuple[int, ...]) -> dict[str, float]:
    """How far rows and gradients of this rank's part are from the whole call's."""
    feature_map, (every, rest), grad = call.map(call.dtype), call.tensors(), call.grad()
    weights = [x for x in feature_map.parameters() if x.requires_grad]
    whole, truths = _truth(replace(call, followed=None))
    part = own_part(mesh, lengths)
    own = {name: _at(name, x, part).detach().to(call.dtype, copy=True) for name, x in every.items()}
    followed = {name: x.requires_grad_() for name, x in own.items() if call.followed in (None, name)}
    out = _part_out(call, own | {name: _at(name, x, part) for name, x in rest.items()}, feature_map, mesh)
    grad = grad[:, :, part].to(out.dtype)
    grads = torch.autograd.grad(out, [*followed.values(), *weights], grad, materialize_grads=True)
    found = {"out": difference(out, whole[:, :, part])}
    by_name = dict(zip(every, truths, strict=False))
    for name, one in zip(followed, grads, strict=False):
        found[name] = difference(one, by_name[name][:, :, part])
    if weights:
        every_weight = zip(summed(grads[len(followed) :], mesh), truths[len(every) :], strict=True)
        for number, (one, truth) in enumerate(every_weight):
            found[f"weight {number}"] = difference(one, truth)
    return found


def errors_of_calls(mesh: DeviceMesh, calls: list[Whole], layouts: list[tuple[int, ...]]) -> list[dict[str, float]]:
    """The errors of all calls in all layouts: one job, since each costs a way there and back for every rank."""
    return [errors(mesh, call, lengths) for call in calls for lengths in layouts]


def compiled_errors(mesh: DeviceMesh, call: Whole) -> dict[str, float]:
    """How far a compiled call's rows and gradients are from an eager one's, in one graph, which has each block."""
    torch.compiler.reset()
    feature_map, (followed, _), lengths = call.map(), call.tensors(), (9, 10)
    part = own_part(mesh, lengths)
    own = {name: _at(name, x, part).clone().requires_grad_() for name, x in followed.items()}
    options = {"mesh": mesh, "is_causal": True, "enable_gqa": True, "window": call.window, "lengths": lengths}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return parallel.linear_attention(query, key, value, feature_map, **options)

    found = {}
    truth, compiled = attend(**own), torch.compile(attend, backend="aot_eager", fullgraph=True)(**own)
    grad = tokens(*truth.shape, seed=9)
    grads = (torch.autograd.grad(out, list(own.values()), grad) for out in (compiled, truth))
    for name, one, other in zip(("out", *own), (compiled, *next(grads)), (truth, *next(grads)), strict=True):
        found[name] = difference(one, other)
    return found


def second_derivatives_told(mesh: DeviceMesh, call: Whole) -> str:
    """What a gradient of a gradient is told."""
    (followed, _), part = call.tensors(), own_part(mesh, LENGTHS[2][0])
    own = {name: _at(name, x, part).clone().requires_grad_() for name, x in followed.items()}
    out = _part_out(call, own, call.map(), mesh)
    try:
        torch.autograd.grad(out.square().sum(), list(own.values()), create_graph=True)
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def distributed_errors(mesh: DeviceMesh, dimension: str) -> float:
    """How far the rows of DTensors, split over data or heads, are from those of the whole."""
    query, key, value = qkv()
    truth = linattn.linear_attention(query, key, value, build("FavorPlus"), is_causal=True, enable_gqa=True)
    over, along = mesh["data"], mesh["sequence"]
    part = own_part(along, LENGTHS[2][0])
    placements = [Shard(0 if dimension == "batch" else 1)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = {"mesh": along, "is_causal": True, "enable_gqa": True}
        return parallel.linear_attention(query, key, value, build("FavorPlus"), **options)

    given = [distribute_tensor(x[:, :, part], over, placements) for x in (query, key, value)]
    found = local_map(attend, placements, (placements,) * 3, device_mesh=over)(*given)
    return difference(found.full_tensor(), truth[:, :, part])


def refusals_of_distributed(mesh: DeviceMesh) -> dict[str, str]:
    """What calls of one process say to DTensors."""
    query, _, value = (distribute_tensor(x, mesh, [Shard(0)]) for x in qkv())
    tokens, feature_map = (query, query, query), build("FavorPlus")
    calls = {
        "linear": lambda: linattn.linear_attention(*tokens, feature_map),
        "stream": lambda: linattn.linear_attention_with_state(*tokens, feature_map),
        "softmax": lambda: linattn.softmax_attention(*tokens),
        "merged": lambda: linattn.merged_attention(*tokens, linattn.MergedKV(4, 4)),
        "map": lambda: feature_map.query(query),
        "layer": lambda: linattn.nn.SoftmaxAttention(8, 2)(value[:, 0]),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            found[name] = str(error)
    return found


def _whole_state(feature_map: FeatureMap, key: Tensor, value: Tensor, **options: Any) -> linattn.State:
    """One process's state; what queries would see is left out."""
    query = torch.zeros_like(key)
    if "gates" in options:
        return gated_attention_with_state(query, key, value, feature_map, options.pop("gates"), **options).state
    return linattn.linear_attention_with_state(query, key, value, feature_map, **options).state


@cache
def _state_truth(map_name: str, weights: str) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """One process's [S, z], its exponents, and the gradients of what has a sequence: the same for all parts."""
    followed, rest = Whole(map_name, weights=weights).tensors()
    followed = {name: x.requires_grad_() for name, x in followed.items() if name != "query"}
    options = _taken(followed | rest)
    state = _whole_state(build(map_name).double(), options.pop("key"), options.pop("value"), **options)
    truth = total(state, state.m)
    grads = torch.autograd.grad(truth, list(followed.values()), tokens(*truth.shape, seed=9))
    return truth.detach(), state.m.detach(), grads


def state_errors(
    mesh: DeviceMesh, map_name: str, weights: str, layouts: list[tuple[int, ...]]
) -> list[dict[str, float]]:
    """How far the state of all ranks, and its gradients, are from one process's, in all layouts."""
    feature_map, (followed, rest) = build(map_name).double(), Whole(map_name, weights=weights).tensors()
    truth, m, truths = _state_truth(map_name, weights)
    every = []
    for lengths in layouts:
        part = own_part(mesh, lengths)
        own = {name: _at(name, x, part).clone().requires_grad_() for name, x in followed.items() if name != "query"}
        given = _taken(own | {name: _at(name, x, part) for name, x in rest.items()})
        state = parallel.absorb(feature_map, given.pop("key"), given.pop("value"), mesh=mesh, **given)
        found = total(state, m)
        # Each rank has the whole state, and the loss is that of one of them.
        grads = torch.autograd.grad(found, list(own.values()), tokens(*truth.shape, seed=9) / mesh.size())
        every.append({"state": difference(found, truth)})
        for name, one, whole in zip(own, grads, truths, strict=True):
            every[-1][name] = difference(one, whole[:, :, part])
    return every


class Counted(TorchDispatchMode):
    """Every collective of torch that runs inside, with the bytes that a rank gives to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1].split(".")[0]
            sizes = [
                x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)
            ]
            # An output stands before the input of a collective that writes in place.
            self.calls.append((name, sizes[-1] if sizes else 0))
        return func(*args, **(kwargs or {}))


def counted(mesh: DeviceMesh, length: int, window: int | None, *, asks: bool = False) -> list[list[tuple[str, int]]]:
    """The collectives of a layer's forward and backward pass, on parts of `length` tokens."""
    feature_map = linattn.feature_maps.FavorPlus(4, 4) if window else linattn.feature_maps.EluPlusOne(4)
    query, key, value = (tokens(1, 2, length, 4, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3))
    options: dict[str, Any] = {} if asks else {"lengths": [length] * mesh.size()}
    with Counted() as forward:
        out = parallel.linear_attention(
            query, key, value, feature_map, mesh=mesh, is_causal=True, window=window, **options
        )
    with Counted() as backward:
        out.sum().backward()
    return [forward.calls, backward.calls]


def refused(mesh: DeviceMesh, fault: str) -> str:
    """What a call with a fault is told, before any collective."""
    query, key, value = qkv(num_queries=8, num_keys=8) if "order" in fault else qkv(num_queries=6, num_keys=6)
    options: dict[str, Any] = {"mesh": mesh, "enable_gqa": True}
    feature_map: FeatureMap = build("FavorPlus")
    if fault == "no mesh":
        options["mesh"] = "sequence"
    if fault == "statistics":
        feature_map = build("Centred-call-FavorPlus")
    if fault == "merged":
        options["window"] = linattn.MergedKV(4, 2, None)
    if fault == "lengths":
        options |= {"window": 4, "lengths": (5, 5)}
    if fault == "left padding":
        options |= {"window": 4, "key_mask": torch.arange(6) >= torch.tensor([[0], [1]])}
    if fault == "queries":
        query, options["is_causal"] = query[:, :, :3], True
    if fault == "gates and bias":
        gates = Gates(tokens(2, 2, 6))
        options |= {"gates": gates, "key_bias": tokens(2, 2, 6), "is_causal": True}
    order = nullcontext()
    if fault in ("reordered", "in order"):
        context_parallel_options.enable_load_balance = fault == "reordered"
        order = context_parallel(mesh, buffers=[query], buffer_seq_dims=[2])
        key, value = key[:, :, ::2], value[:, :, ::2]
    try:
        with order:
            parallel.linear_attention(query, key, value, feature_map, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"
