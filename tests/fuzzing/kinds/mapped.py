"""Any task under torch.func.vmap: each of its slices is what the task alone gives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.kinds import attention, combination, streams
from fuzzing.kinds.gradients import hold, loss, prepared
from fuzzing.limits import Limit, within
from fuzzing.machine import machine_of
from fuzzing.task import Result, Task, compare

_DTYPES = {torch.float64: 0.8, torch.float32: 0.2}


def _draw(case: Case) -> Task:
    """A task that vmap may be applied to."""
    kind = case.dice.weighted({"attention": 5.0, "streams": 3.0, "combination": 2.0})
    options = {"most": 16, "dtypes": _DTYPES}
    if kind == "streams":
        return streams.draw(case.dice, whole=True, **options)
    return (attention if kind == "attention" else combination).draw(case.dice, **options)


def run(case: Case) -> None:
    """Hold every slice, or its gradients, against the truth."""
    task, count = _draw(case), case.dice.pick(1, 2, 3)
    shared = [case.dice.chance(0.2) for _ in range(3)]
    shared[case.dice.integer(0, 2)] = False
    dims = [None if alone else case.dice.pick(0, 0, 1) for alone in shared]
    with_gradients = case.dice.chance(0.4)
    case.note(f"vmap of {count} over {dims}{' of gradients' if with_gradients else ''}: {task}")
    stacked = [
        x if dim is None else torch.stack([x * factor for factor in (1.0, -0.5, 0.25)[:count]], dim)
        for x, dim in zip(task.given, dims, strict=True)
    ]
    slices = [
        replace(task, given=tuple(x if dim is None else x.select(dim, i) for x, dim in zip(stacked, dims, strict=True)))
        for i in range(count)
    ]
    with machine_of(task.sizes):
        if with_gradients:
            _gradients(case, task, slices, stacked, dims)
        else:
            _outputs(task, slices, stacked, dims)


def _outputs(task: Task, slices: list[Task], stacked: list[Tensor], dims: list[int | None]) -> None:
    """Compare outputs."""

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for result in task.call(*inputs) for x in result.tensors)

    found = within(task.limits, lambda: torch.func.vmap(function, in_dims=tuple(dims))(*stacked))
    if not task.is_usable:
        return
    for i, one in enumerate(slices):
        tensors, own = [x[i] for x in found], []
        for result in task.call(*one.given):
            out, log = tensors.pop(0), None if result.log is None else tensors.pop(0)
            own.append(Result(f"slice {i} of {result.name}", out, log, result.roundings))
        with torch.no_grad():
            compare(own, one.truth(*one.exact_inputs(), None), task.dtype)


def _gradients(case: Case, task: Task, slices: list[Task], stacked: list[Tensor], dims: list[int | None]) -> None:
    """Compare gradients of queries, keys and values."""
    alone = within(task.limits, lambda: [one.call(*one.given) for one in slices])
    if not task.is_usable:
        return
    pulled = [prepared(case, one, found) for one, found in zip(slices, alone, strict=True)]
    sizes = [len(group) for group in pulled[0].weights]
    upstream = [
        torch.stack(x) for x in zip(*([x for group in one.weights for x in group] for one in pulled), strict=True)
    ]

    def total(query: Tensor, key: Tensor, value: Tensor, *flat: Tensor) -> Tensor:
        given = iter(flat)
        weights = [[next(given) for _ in range(size)] for size in sizes]
        return loss([result.tensors for result in task.call(query, key, value)], weights)

    limits = []
    if any(x.requires_grad for drawn in task.maps for x in drawn.map.parameters()):
        limits.append(Limit(NotImplementedError, "per-sample gradients", certain=False))
    mapped = torch.func.vmap(torch.func.grad(total, argnums=(0, 1, 2)), in_dims=(*dims, *([0] * len(upstream))))
    found = within(limits, lambda: mapped(*stacked, *upstream))
    for i, one in enumerate(pulled):
        hold(case, one, [x[i].detach() for x in found])
