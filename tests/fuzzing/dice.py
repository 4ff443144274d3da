"""Everything random in a case comes from its number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Thing = TypeVar("Thing")


class Dice:
    """Draws from one number: choices by Python's generator, tensors by torch's."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._generator = torch.Generator().manual_seed(number)

    def chance(self, share: float) -> bool:
        """True so often."""
        return self._random.random() < share

    def pick(self, *options: Thing) -> Thing:
        """One of these, all alike."""
        return self._random.choice(options)

    def weighted(self, options: dict[Thing, float]) -> Thing:
        """One of these, by weight."""
        return self._random.choices(list(options), list(options.values()))[0]

    def integer(self, low: int, high: int) -> int:
        """low ≤ n ≤ high."""
        return self._random.randint(low, high)

    def uniform(self, low: float, high: float) -> float:
        """low ≤ x < high."""
        return self._random.uniform(low, high)

    def shuffled(self, things: Sequence[Any]) -> list[Any]:
        """The same in another order."""
        return self._random.sample(list(things), len(things))

    def length(self, most: int = 40) -> int:
        """A number of tokens: often few, sometimes none."""
        size = self.weighted({"none": 0.04, "one": 0.1, "few": 0.36, "some": 0.35, "many": 0.15})
        found = {
            "none": 0,
            "one": 1,
            "few": self.integer(2, 9),
            "some": self.integer(8, 20),
            "many": self.integer(16, max(most, 16)),
        }[size]
        return min(found, most)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in float64."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def flags(self, *shape: int, share: float = 0.5) -> Tensor:
        """True so often."""
        return torch.rand(*shape, generator=self._generator) < share
