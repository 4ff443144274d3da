"""Who trains on what: texts over some processes, parts of each text over others.

Letters: B batch, L bytes of context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from linattn.nn import Attention
from linattn.parallel import ContextParallel
from linattn.training import Processes


@dataclass(frozen=True)
class Share:
    """This process's windows, and its part of each.

    Attributes:
        processes: all of them: consecutive ones share a text.
        num_parts: into how many parts a text is cut, for as many processes.
    """

    processes: Processes
    num_parts: int = 1

    def check(self, context: int, batch_size: int) -> None:
        """Refuse what cannot be dealt out evenly.

        Raises:
            ValueError: the parts do not divide the processes or the context, or the processes left the batch.
        """
        size, num_parts = self.processes.size, self.num_parts
        if num_parts < 1 or size % num_parts:
            raise ValueError(
                f"a text is cut into parts for some of {size} processes, got {num_parts}; give a number that divides "
                "them"
            )
        if context % num_parts:
            raise ValueError(f"the context must be a multiple of the {num_parts} parts of a text, got {context}")
        if batch_size % (size // num_parts):
            raise ValueError(
                f"the texts of a step are dealt out to {size // num_parts} groups of processes, got {batch_size}; give "
                "a multiple"
            )

    def of(self, batch: Tensor) -> Tensor:
        """This process's part of windows (B, L + 1): the last byte of a part is the first of the next one.

        Example:
            >>> batch = torch.arange(10).view(2, 5)
            >>> [Share(Processes(rank, 4), 2).of(batch).tolist() for rank in (1, 2)]
            [[[2, 3, 4]], [[5, 6, 7]]]
        """
        group, part = divmod(self.processes.rank, self.num_parts)
        length = (batch.shape[1] - 1) // self.num_parts
        return batch[group :: self.processes.size // self.num_parts, part * length : (part + 1) * length + 1]

    def mean(self, values: Tensor) -> float:
        """The mean of all processes' numbers, however many each has."""
        found = torch.stack([values.double().sum(), torch.tensor(float(values.numel()), dtype=torch.float64)])
        self.processes.average_([found])
        return float(found[0] / found[1])

    @contextmanager
    def among(self, model: nn.Module) -> Iterator[None]:
        """The model's attention layers take parts of texts until the block ends."""
        if self.num_parts == 1:
            yield
            return
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        mesh = self._mesh()
        for layer in layers:
            parallelize_module(layer, mesh, ContextParallel(equal_lengths=True))
        try:
            yield
        finally:
            for layer in layers:
                layer.parts = None

    def _mesh(self) -> DeviceMesh:
        """The processes that share a text with this one."""
        shape = self.processes.size // self.num_parts, self.num_parts
        return init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))["sequence"]
