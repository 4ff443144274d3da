"""What every contender owes: an answer to a text, and the bytes that it keeps of it; letters as in __init__.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """The widths of a layer's keys and values, and what a number takes.

    Attributes:
        head_dim: D.
        value_dim: Dv.
        number_bytes: bytes of a number in keys and values.
        num_groups: G, query heads of a key/value head.
    """

    head_dim: int
    value_dim: int
    number_bytes: int = 4
    num_groups: int = 1

    @property
    def statistic_bytes(self) -> int:
        """Bytes of a number that sums many: never fewer than four."""
        return max(self.number_bytes, 4)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value, the unit in which budgets are said.

        Example:
            >>> Sizes(256, 256).key_bytes
            2048
        """
        return (self.head_dim + self.value_dim) * self.number_bytes


class Contender(ABC):
    """A rule that bounds what is kept of a text.

    Attributes:
        kind: its name, whatever its sizes.
        source: the paper that defines it.
    """

    kind: ClassVar[str]
    source: ClassVar[str]

    fewest: ClassVar[int] = 0
    """How many keys it must hold to be itself."""

    @property
    def num_held(self) -> int:
        """How many keys it holds, as far as they are counted one by one."""
        return self.fewest

    @property
    @abstractmethod
    def label(self) -> str:
        """Its name with its sizes."""

    @abstractmethod
    def num_bytes(self, sizes: Sizes, num_tokens: int) -> int:
        """Bytes kept per key/value head after so many tokens at most: keys, values, biases, statistics, scales."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Causal attention over what the rule keeps.

        Args:
            query: (B, H·G, L, D), one per key.
            key: (B, H, L, D).
            value: (B, H, L, Dv).
            scale: factor of q·k.

        Returns:
            (B, H·G, L, Dv) in the query's dtype.
        """
