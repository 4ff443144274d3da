"""A task as one graph of torch.compile, without breaks: what it gives is the truth, and so are its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.kinds import attention, combination, streams
from fuzzing.limits import within
from fuzzing.machine import machine_of
from fuzzing.oracle import MismatchError
from fuzzing.task import Result, Task, compare

_DTYPES = {torch.float64: 0.8, torch.bfloat16: 0.2}


def _draw(case: Case) -> Task:
    """A task that a graph may hold."""
    kind = case.dice.weighted({"attention": 5.0, "streams": 2.0, "combination": 2.0})
    options = {"most": 10, "dtypes": _DTYPES, "fitted": case.dice.chance(0.8)}
    if kind == "streams":
        return streams.draw(case.dice, whole=True, chunks_most=3, **options)
    return (attention if kind == "attention" else combination).draw(case.dice, **options)


def run(case: Case) -> None:
    """Compare the graph's results with the truth, its gradients with eager ones."""
    task, followed = _draw(case), case.dice.chance(0.5)
    case.note(f"torch.compile{' with gradients' if followed else ''} of {task}")
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *inputs: tuple(x for result in task.call(*inputs) for x in result.tensors),
        fullgraph=True,
        backend="aot_eager",
    )
    given, eager = ([x.detach().requires_grad_(followed) for x in task.given] for _ in range(2))
    with machine_of(task.sizes):
        results = within(task.limits, lambda: task.call(*eager))
        if not task.is_usable:
            return
        tensors = list(compiled(*given))
        if followed and task.dtype == torch.float64:
            wanted = _gradients([x for result in results for x in result.tensors], eager)
            _check(_gradients(tensors, given), wanted)
    own = []
    for result in results:
        out, log = tensors.pop(0), None if result.log is None else tensors.pop(0)
        own.append(Result(f"compiled {result.name}", out, log, result.roundings))
    with torch.no_grad():
        compare(own, task.truth(*task.exact_inputs(), None), task.dtype)


def _gradients(tensors: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum over all tensors."""
    loss = sum(x.nan_to_num(0, 0, 0).sin().sum() for x in tensors)
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if y is None else y for x, y in zip(leaves, found, strict=True)]


def _check(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Refuse anything but the same numbers in perhaps another order of sums."""
    for name, x, y in zip(("query", "key", "value"), found, wanted, strict=True):
        if not y.isfinite().all():
            continue
        band = 1e-10 * (float(y.abs().max()) + 1e-6 if y.numel() else 1.0)
        if not ((x - y).abs() <= band).all():
            raise MismatchError(
                f"gradient of {name} in a graph is off by {float((x - y).abs().max()):.3g} > {band:.3g}"
            )
