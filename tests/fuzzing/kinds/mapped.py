"""Any task under torch.func.vmap: each of its slices is what the task alone gives."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.kinds import attention, combination, streams
from fuzzing.limits import Limit, within
from fuzzing.machine import machine_of
from fuzzing.oracle import MismatchError
from fuzzing.task import Result, Task, compare
from fuzzing.tokens import without_masked

_DTYPES = {torch.float64: 0.8, torch.float32: 0.2}


def _draw(case: Case) -> Task:
    """A task that vmap may be applied to."""
    kind = case.dice.weighted({"attention": 5.0, "streams": 3.0, "combination": 2.0})
    options = {"most": 16, "dtypes": _DTYPES}
    if kind == "streams":
        return streams.draw(case.dice, whole=True, **options)
    return (attention if kind == "attention" else combination).draw(case.dice, **options)


def run(case: Case) -> None:
    """Compare every slice with the truth; gradients with those of a loop."""
    task, count = _draw(case), case.dice.pick(1, 2, 3)
    shared = [case.dice.chance(0.2) for _ in range(3)]
    shared[case.dice.integer(0, 2)] = False
    dims = [None if alone else case.dice.pick(0, 0, 1) for alone in shared]
    grads = case.dice.chance(0.4)
    case.note(f"vmap of {count} over {dims}{' of gradients' if grads else ''}: {task}")
    stacked = [
        x if dim is None else torch.stack([x * factor for factor in (1.0, -0.5, 0.25)[:count]], dim)
        for x, dim in zip(task.given, dims, strict=True)
    ]
    slices = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(stacked, dims, strict=True)] for i in range(count)
    ]
    limits = [*task.limits]
    trainable = any(x.requires_grad for drawn in task.maps for x in drawn.map.parameters())
    if grads and trainable:
        limits.append(Limit(NotImplementedError, "per-sample gradients", certain=False))
    function = _gradient(task) if grads else _outputs(task)
    with machine_of(task.sizes):
        found = within(limits, lambda: torch.func.vmap(function, in_dims=tuple(dims))(*stacked))
        results = task.call(*slices[0])
        if not task.is_usable:
            return
        if grads:
            looped = [function(*one) for one in slices]
            for i, one in enumerate(looped):
                _check_gradients([x[i] for x in found], one, task)
            return
    for i, one in enumerate(slices):
        tensors = [x[i] for x in found]
        own = []
        for result in results:
            out, log = tensors.pop(0), None if result.log is None else tensors.pop(0)
            own.append(Result(f"slice {i} of {result.name}", out, log, result.roundings))
        with torch.no_grad():
            compare(own, task.truth(*_exact(task, one), None), task.dtype)


def _exact(task: Task, inputs: list[Tensor]) -> list[Tensor]:
    """Inputs as the truth takes them."""
    query, key, value = inputs
    return [query.double(), without_masked(key, task.live).double(), without_masked(value, task.live).double()]


def _outputs(task: Task):
    """All tensors of the results."""
    return lambda *inputs: tuple(x for result in task.call(*inputs) for x in result.tensors)


def _gradient(task: Task):
    """Gradients of queries, keys and values."""

    def loss(*inputs: Tensor) -> Tensor:
        return sum(result.out.double().sin().sum() for result in task.call(*inputs))

    return torch.func.grad(loss, argnums=(0, 1, 2))


def _check_gradients(found: list[Tensor], wanted: tuple[Tensor, ...], task: Task) -> None:
    """Refuse anything but the same numbers in perhaps another order of sums."""
    for name, x, y in zip(("query", "key", "value"), found, wanted, strict=True):
        if not y.isfinite().all():
            continue
        band = 1e4 * torch.finfo(task.dtype).eps * (float(y.abs().max()) + 1e-6 if y.numel() else 1.0)
        if x.shape != y.shape or not ((x - y).abs() <= band).all():
            raise MismatchError(
                f"gradient of {name} under vmap is off by {float((x - y).abs().max()):.3g} > {band:.3g}"
            )
