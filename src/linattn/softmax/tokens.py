"""Keys and values with biases on their logits; letters as in softmax/__init__.py, w tokens of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Tokens(NamedTuple):
    """Keys (B, H, n, D), values (B, H, n, Dv), and biases on their logits (B, H or 1, n), -inf for absent ones."""

    key: Tensor
    value: Tensor
    bias: Tensor

    def then(self, other: Tokens) -> Tokens:
        """Append other tokens; neither is copied where the other is none."""
        if self.bias.shape[2] == 0 or other.bias.shape[2] == 0:
            return other if self.bias.shape[2] == 0 else self
        return Tokens(*(torch.cat(pair, 2) for pair in zip(self, other, strict=True)))

    def pick(self, index: Tensor) -> Tokens:
        """Select the tokens of the numbers (B, H, n)."""
        return Tokens(picked(self.key, index), picked(self.value, index), self.bias.gather(-1, index))

    def cut(self, start: int, stop: int) -> Tokens:
        """Consecutive ones."""
        return Tokens(*(x[:, :, start:stop] for x in self))


def picked(x: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, H, L, ·) by number (B, H, n)."""
    return torch.take_along_dim(x, index.unsqueeze(-1), dim=2)


def with_places(flatten: Callable[[Any], tuple[list[Any], Any]]) -> Callable[[Any], Any]:
    """Flatten to leaves with their places, as torch.export names its inputs."""

    def flattened(x: Any) -> Any:
        """Each leaf beside its place, and what is no leaf."""
        leaves, context = flatten(x)
        return [(pytree.SequenceKey(place), leaf) for place, leaf in enumerate(leaves)], context

    return flattened


torch.serialization.add_safe_globals([Tokens])


def by_block(rows: Tensor, num_blocks: int, window: int) -> Tensor:
    """Rows (B, H, G, L, D), L ≤ n·w, as the rows of blocks (B, H, n, G·w, D), zeros after the last."""
    short = num_blocks * window - rows.shape[3]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows
    blocks: Tensor = rows.unflatten(3, (num_blocks, window))
    return blocks.transpose(2, 3).flatten(3, 4)
