"""Ranks on gloo, and what they do in benchmarks: verify, time and count calls on parts of a sequence.

Letters: B batch, H heads, L tokens of a rank, D head width, P ranks.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, MutableMapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import linattn
from linattn import parallel
from linattn.parallel.parts import Part, Views, with_neighbours
from linattn.parallel.ranks import Ranks
from measuring import HEAD_DIM, NUM_FEATURES, favor, forward_and_backward, relative_error, tokens

# Of what is timed; twice as many are dealt out to ranks.
_HEADS = 2
_LIMIT = datetime.timedelta(seconds=900)


def on_ranks(size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What job(mesh, *arguments) returns on each of so many processes of one thread."""
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Manager() as manager:
        answers = manager.dict()
        # It ends the others, and raises, where one of them fails.
        spawn(_serve, (size, str(Path(folder) / "store"), answers, job, arguments), nprocs=size)
        return [answers[rank] for rank in range(size)]


def _serve(
    rank: int, size: int, store: str, answers: MutableMapping[int, Any], job: Callable[..., Any], arguments: tuple
) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=_LIMIT)
    answers[rank] = job(init_device_mesh("cpu", (size,)), *arguments)
    dist.barrier()
    dist.destroy_process_group()


def attend(
    mesh: DeviceMesh, inputs: list[Tensor], kind: str, *, is_causal: bool, num_features: int = NUM_FEATURES
) -> Tensor:
    """This rank's rows: by "states", or by "window", which exchanges tokens too."""
    lengths = [inputs[1].shape[2]] * mesh.size()
    window = 64 if kind == "window" else None
    options = {"mesh": mesh, "is_causal": is_causal, "window": window, "lengths": lengths}
    return parallel.linear_attention(*inputs, favor(num_features), **options)


def error(mesh: DeviceMesh, length: int, kind: str, is_causal: bool) -> float:
    """The largest relative error of rows and gradients of this rank against one process's, in float32."""
    rank, size = mesh.get_local_rank(), mesh.size()
    at = slice(rank * length, (rank + 1) * length)
    whole = [x[:, :2].detach().requires_grad_() for x in tokens(size * length)]
    grad = tokens(size * length, seed=1)[0][:, :2]
    own = [x[:, :, at].detach().requires_grad_() for x in whole]
    window = 64 if kind == "window" else None
    truth = linattn.linear_attention(*whole, favor(), is_causal=is_causal, window=window)
    found = attend(mesh, own, kind, is_causal=is_causal)
    pairs = [(found, truth[:, :, at])]
    truths = torch.autograd.grad(truth, whole, grad)
    pairs += [(x, y[:, :, at]) for x, y in zip(torch.autograd.grad(found, own, grad[:, :, at]), truths, strict=True)]
    return max(relative_error(x, y) for x, y in pairs)


def timed(mesh: DeviceMesh, length: int, is_causal: bool, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds by the clock and of the processor, in turn, forward and backward.

    The first rank alone on its own part; all on theirs, each by itself; all on one sequence; the exchange of a state.
    """
    inputs = [x[:, :_HEADS].detach().requires_grad_() for x in tokens(length)]
    grad, feature_map = tokens(length, seed=1)[0][:, :_HEADS], favor()

    def itself(*qkv: Tensor) -> Tensor:
        return linattn.linear_attention(*qkv, feature_map, is_causal=is_causal)

    alone = forward_and_backward(itself, inputs, grad)
    split = forward_and_backward(lambda *qkv: attend(mesh, list(qkv), "states", is_causal=is_causal), inputs, grad)
    contenders = {
        "one": alone if mesh.get_local_rank() == 0 else lambda: None,
        "each by itself": alone,
        "one sequence": split,
        "exchange": lambda: _exchanged(mesh),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, run in contenders.items():
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            run()
            ended = time.perf_counter(), time.process_time()
            if repeat:
                found[name].append((ended[0] - begun[0], ended[1] - begun[1]))
    return found


def _exchanged(mesh: DeviceMesh) -> None:
    """The collectives of a layer: its state there, the gradient back."""
    state = torch.zeros(1, _HEADS, NUM_FEATURES * (HEAD_DIM + 2))
    every = state.new_empty(mesh.size(), *state.shape[1:])
    dist.all_gather_single(every, state, group=mesh.get_group())
    dist.reduce_scatter_single(state, every, group=mesh.get_group())


class _Counted(TorchDispatchMode):
    """Collectives, and the bytes of them that leave a rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._rank, self._size, self.sent, self.number = mesh.get_local_rank(), mesh.size(), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = [x for x in tree_leaves(args) if isinstance(x, Tensor)][-1]
            self.sent += given.element_size() * int(self._leaving(func.name(), given.numel(), args))
            self.number += 1
        return func(*args, **(kwargs or {}))

    def _leaving(self, name: str, count: int, args: Any) -> float:
        """How many of the numbers that a rank gives to a collective are sent to another."""
        if "allgather" in name:
            return count * (self._size - 1)
        if "reduce_scatter" in name:
            return count * (self._size - 1) / self._size
        if "alltoall" in name:
            return count - args[-2][self._rank]
        raise ValueError(f"nothing is known of {name}")


def counted(mesh: DeviceMesh, kinds: list[str], lengths: list[int]) -> dict[tuple[str, int], tuple[int, int]]:
    """Collectives of a layer of 64 features, forward and backward, and the bytes that leave this rank."""
    counts = {}
    for kind in kinds:
        for length in lengths:
            inputs = [x[:, : 2 * _HEADS].detach().requires_grad_() for x in tokens(length)]
            with _Counted(mesh) as found:
                if kind == "keys":
                    _all_keys(mesh, inputs)
                else:
                    attend(mesh, inputs, kind, is_causal=True, num_features=64).sum().backward()
            counts[kind, length] = found.number, found.sent
    return counts


def _all_keys(mesh: DeviceMesh, inputs: list[Tensor]) -> None:
    """What softmax layers exchange, without their softmax: every rank is sent all keys before its own."""
    starts = [rank * inputs[1].shape[2] for rank in range(mesh.size() + 1)]
    views = Views(starts, [0] * len(starts), starts[1:])
    seen = with_neighbours(Ranks.of(mesh), Part(*inputs, None, None), views)
    (seen.query.sum() + seen.key.sum() + seen.value.sum()).backward()
