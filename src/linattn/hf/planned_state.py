"""What a layer with a method per head keeps of the tokens it has seen.

Letters: B batch, H heads, L tokens, D head width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn.attention import State


@dataclass(frozen=True, eq=False)
class KeptKeys:
    """Every key and value so far of heads that attend exactly; immutable.

    Attributes:
        key: (B, H, L, D).
        value: (B, H, L, Dv).
        key_mask: (B, L) bool, True = attend; None for all.
    """

    key: Tensor
    value: Tensor
    key_mask: Tensor | None

    def extended(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> KeptKeys:
        """These and later ones."""
        mask = None
        if self.key_mask is not None or key_mask is not None:
            mask = torch.cat((_whole(self.key_mask, self.key), _whole(key_mask, key)), 1)
        return KeptKeys(torch.cat((self.key, key), 2), torch.cat((self.value, value), 2), mask)

    def select(self, indices: Tensor) -> KeptKeys:
        """The given rows of the batch, in that order."""
        mask = None if self.key_mask is None else self.key_mask[indices]
        return KeptKeys(self.key[indices], self.value[indices], mask)


@dataclass(frozen=True, eq=False)
class PlannedState:
    """The state of a layer with a method per head; immutable.

    Attributes:
        states: of the heads of each method but the exact one, by its written form.
        kept: the keys and values of the exact heads; None where there are none.
    """

    states: dict[str, State]
    kept: KeptKeys | None

    def select(self, indices: Tensor) -> PlannedState:
        """The given rows of the batch, in that order."""
        kept = None if self.kept is None else self.kept.select(indices)
        return PlannedState({label: state.select(indices) for label, state in self.states.items()}, kept)

    @property
    def sample(self) -> Tensor:
        """One of its tensors, (B, …)."""
        return self.kept.key if self.kept is not None else next(iter(self.states.values())).S


def _whole(key_mask: Tensor | None, key: Tensor) -> Tensor:
    """The mask, (B, L), also where all keys are to be attended to."""
    return key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool) if key_mask is None else key_mask


for _kind in (KeptKeys, PlannedState):
    pytree.register_dataclass(_kind, serialized_type_name=f"linattn.{_kind.__name__}")
