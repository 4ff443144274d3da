"""Who trains on what: texts over some processes, parts of each text over others.

Letters: B batch, L bytes of context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from linattn.hf import LinearLMForCausalLM
from linattn.nn import Attention
from linattn.parallel import ContextParallel
from linattn.training import Processes


@dataclass(frozen=True)
class Share:
    """This process's windows, and its part of each."""

    processes: Processes  # all of them: consecutive ones share a text
    num_parts: int = 1  # into how many parts a text is cut, for as many processes
    # whether each process keeps a part of the weights, of their gradients and of the optimiser's moments
    is_sharded: bool = False

    def check(self, context: int, batch_size: int) -> None:
        """Refuse what cannot be dealt out evenly."""
        size, num_parts = self.processes.size, self.num_parts
        if self.is_sharded and size == 1:
            raise ValueError("weights are sharded over several processes, got one; start more, or leave shard out")
        if num_parts < 1 or size % num_parts:
            raise ValueError(
                f"num_parts must be a positive number that divides the {size} processes, got {num_parts}; each part of "
                "a text is for one of them"
            )
        if context % num_parts:
            raise ValueError(f"the context must be a multiple of the {num_parts} parts of a text, got {context}")
        if batch_size % (size // num_parts):
            raise ValueError(
                f"the texts of a step are dealt out to {size // num_parts} groups of processes, got {batch_size}; give "
                "a multiple"
            )

    def of(self, batch: Tensor) -> Tensor:
        """This process's part of windows (B, L + 1): the last byte of a part is the first of the next one."""
        group, part = divmod(self.processes.rank, self.num_parts)
        length = (batch.shape[1] - 1) // self.num_parts
        return batch[group :: self.processes.size // self.num_parts, part * length : (part + 1) * length + 1]

    def mean(self, values: Callable[[Tensor], Tensor], batch: Tensor) -> float:
        """The mean of what is found on all processes' parts of windows (n, L + 1), however many each has.

        Sharded weights are gathered in every pass, so all make as many: some read a window again, which is not counted.
        """
        own = self.of(batch)
        if self.is_sharded:
            groups = self.processes.size // self.num_parts
            again = -(-len(batch) // groups) - len(own)
            repeated = replace(self, processes=Processes(self.processes.rank % self.num_parts, self.num_parts))
            found = values(torch.cat((own, repeated.of(batch[:again]))))[: len(own)]
        else:
            found = values(own)
        return self._mean(found)

    def _mean(self, values: Tensor) -> float:
        """The mean of all processes' numbers."""
        found = torch.stack([values.double().sum(), torch.tensor(float(values.numel()), dtype=torch.float64)])
        self.processes.average_([found])
        return float(found[0] / found[1])

    @contextmanager
    def laid_out(self, model: LinearLMForCausalLM) -> Iterator[LinearLMForCausalLM]:
        """The model that is trained in the block, on this process's part of texts; at its end the weights come back.

        Sharded it is a copy, a block's weights gathered when it is passed through and let go after that.
        """
        if not self.is_sharded:
            with self._among(model):
                yield model
            return
        copied = copy.deepcopy(model)
        # Before the weights are cut: their layers are compared over the processes.
        with self._among(copied):
            mesh = init_device_mesh("cpu", (self.processes.size,))
            for block in copied.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(copied, mesh=mesh)
            yield copied
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in copied.state_dict().items()}
        model.load_state_dict(whole)

    @contextmanager
    def _among(self, model: nn.Module) -> Iterator[None]:
        """The model's attention layers take parts of texts until the block ends."""
        if self.num_parts == 1:
            yield
            return
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        shape = self.processes.size // self.num_parts, self.num_parts
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))["sequence"]
        for layer in layers:
            parallelize_module(layer, mesh, ContextParallel(equal_lengths=True))
        try:
            yield
        finally:
            for layer in layers:
                layer.parts = None
