"""The texts of a step, dealt out to the processes of a conversion."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from linattn.convert.running import Batch
from linattn.processes import Processes


def own_texts(batch: Batch, processes: Processes) -> Batch:
    """This process's rows of every tensor (B, …) of a batch.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[1], [2], [3], [4]])}
        >>> own_texts(batch, Processes(1, 2))["input_ids"].tolist()
        [[2], [4]]
    """
    if processes.size == 1:
        return batch
    return {name: x[processes.rank :: processes.size] for name, x in batch.items()}


def check_shared(batches: Iterable[Batch], processes: Processes) -> None:
    """Refuse batches that cannot be dealt out evenly.

    Raises:
        ValueError: a tensor's rows are no multiple of the processes, or tensors of a batch differ in rows.
    """
    if processes.size == 1:
        return
    for number, batch in enumerate(batches):
        rows = {name: len(x) for name, x in batch.items()}
        if len(set(rows.values())) > 1 or next(iter(rows.values())) % processes.size:
            raise ValueError(
                f"the texts of a step are dealt out to {processes.size} processes, and batch {number} has rows {rows}; "
                "give every tensor as many rows, a multiple of the processes (batch_size for texts)"
            )


def mean_of(x: Tensor, processes: Processes) -> Tensor:
    """The mean of all processes' numbers, a constant for gradients."""
    if processes.size == 1:
        return x
    mean = x.detach().clone()
    processes.average_([mean])
    return mean
