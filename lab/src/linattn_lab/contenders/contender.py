"""What every contender owes: an answer to a text, and the bytes that it keeps of it; letters as in __init__.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from linattn.kv_cache.budget import Sizes


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
