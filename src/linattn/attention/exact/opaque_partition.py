"""The partition of keys as one custom operator: the compiler and torch.vmap see its shapes, never its rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.attention.exact.partitioning import partition_plain

opaque_partition = torch.library.custom_op("linattn::partition", partition_plain, mutates_args=())


@opaque_partition.register_fake
def _(distance: Tensor, log_weight: Tensor, log_mass: Tensor, num_clusters: int) -> Tensor:
    """The numbers' shape."""
    return log_weight.new_empty(log_weight.shape, dtype=torch.int64)


def _mapped(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    """One more dimension in front, as the operator takes any number of them."""
    *tensors, num_clusters = arguments
    wide = (
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims[:-1], strict=True)
    )
    return opaque_partition(*wide, num_clusters), 0


torch.library.register_vmap(opaque_partition, _mapped)
