"""The keys a state keeps exactly; letters as in exact/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class ExactKeys:
    """The latest keys of a stream and its heavy ones, beside the sums of all others.

    Attributes:
        heavy_key: (B, H, g, D).
        heavy_value: (B, H, g, Dv).
        heavy_bias: (B, H, g), added to their logits; -inf for a free place.
        heavy_score: (B, H, g), what their mass was when they left the neighbourhood; -inf for a free place.
        recent_key: (B, H, r, D): those of the block before the current one and of the current one, r ≤ 2w.
        recent_value: (B, H, r, Dv).
        recent_bias: (B, H, r), added to their logits; -inf for masked ones.
        recent_mass: (B, H, r), how much they were attended to so far.
        window: w.
    """

    heavy_key: Tensor
    heavy_value: Tensor
    heavy_bias: Tensor
    heavy_score: Tensor
    recent_key: Tensor
    recent_value: Tensor
    recent_bias: Tensor
    recent_mass: Tensor
    window: int

    @classmethod
    def empty(cls, key: Tensor, value: Tensor, *, window: int, num_heavy: int) -> ExactKeys:
        """No keys, for tokens like these (B, H, L, ·)."""
        few, none = key.new_zeros(*key.shape[:2], num_heavy, 1), key.new_zeros(*key.shape[:2], 0)
        kept = torch.promote_types(key.dtype, torch.float32)
        return cls(
            few.expand(-1, -1, -1, key.shape[-1]).clone(),
            few.expand(-1, -1, -1, value.shape[-1]).clone(),
            few.squeeze(-1).to(kept) - torch.inf,
            few.squeeze(-1).to(kept) - torch.inf,
            key[:, :, :0],
            value[:, :, :0],
            none.to(kept),
            none.to(kept),
            window,
        )

    @property
    def num_heavy(self) -> int:
        """g."""
        return self.heavy_score.shape[-1]

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them: keys (B, H, g + r, D), values, and biases, -inf for free places."""
        key = torch.cat((self.heavy_key, self.recent_key), 2)
        value = torch.cat((self.heavy_value, self.recent_value), 2)
        return key, value, torch.cat((self.heavy_bias, self.recent_bias), 2)

    def decay(self, log_factor: Tensor) -> ExactKeys:
        """All weights times exp(log_factor), (B or 1, H or 1); scores and masses compare keys and stay."""
        shift = log_factor.unsqueeze(-1).to(self.recent_bias.dtype)
        return replace(self, heavy_bias=self.heavy_bias + shift, recent_bias=self.recent_bias + shift)

    def each(self, change: Callable[[Tensor], Tensor]) -> ExactKeys:
        """The same with each tensor changed alike."""
        return _from_leaves(map(change, _leaves(self)[0]), self.window)


def _leaves(keys: ExactKeys) -> tuple[list[Tensor], int]:
    """Its tensors, in order, and its window."""
    *tensors, window = (getattr(keys, field.name) for field in fields(keys))
    return tensors, window


def _from_leaves(tensors: Iterable[Any], window: int) -> ExactKeys:
    """Exact keys from what torch's tree utilities took out of some."""
    heavy_key, heavy_value, heavy_bias, heavy_score, key, value, bias, mass = tensors
    return ExactKeys(heavy_key, heavy_value, heavy_bias, heavy_score, key, value, bias, mass, window)


pytree.register_pytree_node(ExactKeys, _leaves, _from_leaves, serialized_type_name="linattn.ExactKeys")
