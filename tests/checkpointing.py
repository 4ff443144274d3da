"""Checkpoints of a small model, as tests of them want them: whole ones, and ones that somebody has rewritten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from linattn.processes import Processes
from linattn.training.checkpoints import Progress, WorkFolder
from linattn.training.tensors import held, put, read, write

ALONE = Processes(0, 1)
Trained = tuple[nn.Module, torch.optim.Optimizer]


def train_a_little() -> Trained:
    """A model whose head is its embedding, and an optimiser that has taken two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(folder: WorkFolder, trained: Trained, progress: Progress, best: dict[str, Tensor]) -> None:
    """A checkpoint of a transfer, by one process."""
    with folder.draft("transfer", progress) as draft:
        write(draft, held(*trained, best), ALONE)


def resume(folder: WorkFolder, trained: Trained) -> tuple[Progress, dict[str, Tensor]]:
    """The last one, in model and optimiser: its progress, and the best weights."""
    last = folder.last("transfer")
    assert last is not None
    place, progress = last
    return progress, put(read(place, *trained), *trained, ALONE)


def seal(checkpoint: Path) -> None:
    """Write the digests that the files have, as anybody can."""
    names = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "digests.json"}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in names.items()}
    (checkpoint / "digests.json").write_text(json.dumps(digests))


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever the block does leaves weights, the optimiser's state and random numbers to the bit."""

    def every() -> dict[str, Tensor]:
        best = {name: x.detach().clone() for name, x in model.state_dict().items()}
        return {name: x.detach().clone() for name, x in held(model, optimizer, best).items()}

    before = every()
    yield
    after = every()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
