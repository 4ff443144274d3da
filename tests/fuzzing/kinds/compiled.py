"""A task as one graph of torch.compile, without breaks: what it gives is the truth, and so are its gradients."""

from __future__ import annotations

import torch

from fuzzing.case import Case
from fuzzing.kinds import attention, combination, streams
from fuzzing.kinds.gradients import gradients, hold, loss, prepared
from fuzzing.limits import within
from fuzzing.machine import machine_of
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
    """Hold the graph's results, or its gradients too, against the truth."""
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
        tensors, own = list(compiled(*given)), []
        for result in results:
            out, log = tensors.pop(0), None if result.log is None else tensors.pop(0)
            own.append(Result(f"compiled {result.name}", out, log, result.roundings))
        if followed:
            pulled = prepared(case, task, own)
            hold(case, pulled, gradients(loss([result.tensors for result in own], pulled.weights), given))
            return
    with torch.no_grad():
        compare(own, task.truth(*task.exact_inputs(), None), task.dtype)
