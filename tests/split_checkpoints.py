"""Jobs of ranks, and of one process: write and read checkpoints of weights that are sharded in one way or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from linattn.processes import Processes
from linattn.training import Steps, Training, WorkFolder, checkpoints, tensors, train
from linattn.training.tensors import held, put, read, write


def model(mesh: DeviceMesh | None, dim: int, width: int = 5) -> nn.Sequential:
    """Weights of which no number of ranks divides all rows, one of them under two names; sharded over a mesh."""
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4), nn.LayerNorm(4)).double()
    made.register_parameter("tied", made[0].weight)
    if mesh is not None:
        # torch cuts in another dimension than the first what it can cut evenly.
        fully_shard(made, mesh=mesh, shard_placement_fn=lambda x: Shard(dim if x.shape[dim:] == (4,) else 0))
    return made


def whole(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of each tensor, from all ranks."""
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for name, x in parts.items()}


def written(mesh: DeviceMesh | None, folder: Path, dim: int) -> dict[str, Tensor]:
    """A model after two steps, the last weight without a gradient: what it wrote of itself."""
    made = model(mesh, dim)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    for _ in range(2):
        made(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
        made[2].bias.grad = None
        optimizer.step()
    torch.rand(7)
    best = {name: (x + 1).to("cpu") for name, x in made.state_dict().items()}
    every = held(made, optimizer, best)
    write(folder, every, Processes.of_this_run())
    return whole(every)


def resumed(mesh: DeviceMesh | None, folder: Path, dim: int) -> dict[str, Tensor]:
    """A new model gone on from what another wrote: all that it would write."""
    made, processes = model(mesh, dim), Processes.of_this_run()
    optimizer = torch.optim.AdamW(made.parameters())
    torch.rand(3)
    best = put(processes.all_do(lambda: read(folder, made, optimizer)), made, optimizer, processes)
    return whole(held(made, optimizer, best))


def draws(mesh: DeviceMesh, work: Path) -> tuple[list[Tensor], list[Tensor]]:
    """What losses draw in eight steps of a training, and in those of one that is cut off after four and resumed."""
    every: list[list[Tensor]] = []
    folder = WorkFolder(work, {}, kind="training") if Processes.of_this_run().is_first else None
    for number, kept in ((8, None), (4, folder), (8, folder)):
        made, drawn = model(None, 0), []
        # A process that resumes has drawn others.
        torch.rand(len(every) // 2)

        def loss(_: int, made: nn.Module = made, drawn: list[Tensor] = drawn) -> Tensor:
            drawn.append(torch.rand(3))
            return made(torch.ones(1, 4, dtype=torch.float64)).square().sum()

        parameters = [(list(made.parameters()), 1e-2)]
        train(Training("law", made, parameters, loss, lambda: 1.0, Steps(number)), kept, lambda *_: None)
        every.append(drawn)
    return every[0], every[1] + every[2]


def _said(do: Callable[[], object]) -> str:
    """How a call was refused."""
    try:
        do()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refused(mesh: DeviceMesh, folder: Path, other: int) -> tuple[str, bool]:
    """How each rank is refused whose model goes on from a checkpoint, one of them another one; whether it changed."""
    processes = Processes.of_this_run()
    made = model(mesh, 0, 6 if processes.rank == other else 5)
    optimizer, before = torch.optim.AdamW(made.parameters()), [x.to_local().clone() for x in made.parameters()]
    said = _said(lambda: put(processes.all_do(lambda: read(folder, made, optimizer)), made, optimizer, processes))
    now = [x.to_local() for x in made.parameters()]
    return said, bool(optimizer.state) or not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def cut_off(mesh: DeviceMesh, work: Path, *, is_sharded: bool, place: str, rank: int) -> str:
    """How a training ends on each rank when a function of the library fails on one of them, for want of space."""
    processes = Processes.of_this_run()
    made = model(mesh if is_sharded else None, 0)
    folder = WorkFolder(work, {}, kind="training") if processes.is_first else None

    def loss(_: int = 0) -> Tensor:
        return made(torch.ones(1, 4, dtype=torch.float64)).square().sum()

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left here")

    module, _, name = place.rpartition(".")
    owner = {"tensors": tensors, "checkpoints": checkpoints, "WorkFolder": WorkFolder}[module]
    own = getattr(owner, name)
    if processes.rank == rank:
        setattr(owner, name, full)
    training = Training("law", made, [(list(made.parameters()), 1e-2)], loss, lambda: float(loss().detach()), Steps(2))
    try:
        return _said(lambda: train(training, folder, lambda *_: None))
    finally:
        setattr(owner, name, own)
