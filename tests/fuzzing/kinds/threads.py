"""Any task in several threads at once, with one map: bits equal, and the map's own tensors still the same objects."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.kinds.gradients import draw_task
from fuzzing.limits import within
from fuzzing.machine import machine_of
from fuzzing.oracle import MismatchError, check_same
from fuzzing.task import Task

_THREADS = (2, 8)
_REPEATS = 2


def run(case: Case) -> None:
    """Compare threads with one thread, outputs and gradients."""
    task, followed = draw_task(case), case.dice.chance(0.5)
    case.note(f"threads{' with gradients' if followed else ''}: {task}")
    before = _tensors(task)
    with machine_of(task.sizes):
        alone = within(task.limits, lambda: _once(task, followed))
        for count in _THREADS:
            start, interval = threading.Barrier(count), sys.getswitchinterval()

            def work(start: threading.Barrier = start) -> list[list[Tensor]]:
                start.wait()
                return [_once(task, followed) for _ in range(_REPEATS)]

            # Threads take turns as often as they can.
            sys.setswitchinterval(1e-6)
            try:
                with ThreadPoolExecutor(count) as pool:
                    found = [future.result() for future in [pool.submit(work) for _ in range(count)]]
            finally:
                sys.setswitchinterval(interval)
            for results in found:
                for repeat in results:
                    for index, (x, y) in enumerate(zip(repeat, alone, strict=True)):
                        check_same(x, y, f"tensor {index} in one of {count} threads")
            _check_kept(before, _tensors(task), count)


def _once(task: Task, followed: bool) -> list[Tensor]:
    """All tensors of a task's results, and the gradients of its inputs and parameters."""
    leaves = [x.detach().requires_grad_(followed) for x in task.given]
    found = [x for result in task.call(*leaves) for x in result.tensors]
    own = [x for drawn in task.maps for x in drawn.map.parameters() if x.requires_grad]
    wanted = [*(leaves if followed else []), *own]
    loss = sum(x.nan_to_num(0, 0, 0).double().sum() for x in found)
    if not wanted or not isinstance(loss, Tensor) or not loss.requires_grad:
        return [x.detach() for x in found]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [x.detach() for x in found] + [torch.zeros(0) if x is None else x for x in grads]


def _tensors(task: Task) -> dict[str, Tensor]:
    """Parameters and buffers of the maps, by name."""
    found = {}
    for index, drawn in enumerate(task.maps):
        for name, x in (*drawn.map.named_parameters(), *drawn.map.named_buffers()):
            found[f"{index} {name}"] = x
    return found


def _check_kept(before: dict[str, Tensor], after: dict[str, Tensor], count: int) -> None:
    """Refuse other objects than before."""
    changed = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]
    if changed:
        raise MismatchError(f"after {count} threads the map's {sorted(changed)} are other objects")
