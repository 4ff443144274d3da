"""States that are damaged one tensor at a time, and states that went through a file, of either product."""

from __future__ import annotations

import io
from typing import TypeVar

import torch
from torch import Tensor

State = TypeVar("State")

CHANGES = {
    "shorter": lambda x: x[..., :-1],
    "longer": lambda x: torch.cat((x, x), -1),
    "another batch": lambda x: torch.cat((x, x)),
    "another dtype": lambda x: x.to(torch.int32),
    "half": lambda x: x.half() if x.dtype == torch.float32 else x.double(),
    "another device": lambda x: x.to("meta"),
}


def tokens(length: int = 30) -> list[Tensor]:
    """Query, key and value of two heads."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 8, generator=generator) for _ in range(3)]


def read_again(state: State) -> State:
    """A state that was saved, and read by torch's safe loader."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded
