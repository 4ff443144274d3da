"""The stages of a conversion, and a model's tensors before and after one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linattn.convert import Agreement, Conversion, stages
from linattn.convert.running import Outputs


def names(conversion: Conversion) -> list[str]:
    """The stages that were measured, in order."""
    return [stage.name for stage in conversion.stages]


def agreement(outputs: Sequence[Outputs], exact: Sequence[Outputs]) -> Agreement:
    """Two models' outputs on the same texts, one per batch, compared."""
    with torch.no_grad():
        return stages._agreement([stages._compared(*pair, {}) for pair in zip(outputs, exact, strict=True)])


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's tensors."""
    return {name: x.clone() for name, x in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether a model has the tensors it had, to the bit."""
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)
