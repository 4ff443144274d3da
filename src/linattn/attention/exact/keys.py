"""The keys a state keeps exactly; letters as in exact/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn.attention.exact.rule import Exact, parse_exact


class Tokens(NamedTuple):
    """Keys (B, H, n, D), values (B, H, n, Dv), and biases on their logits (B, H or 1, n), -inf for absent ones."""

    key: Tensor
    value: Tensor
    bias: Tensor

    def then(self, other: Tokens) -> Tokens:
        """These and then others; neither is copied where the other is none."""
        if self.bias.shape[2] == 0 or other.bias.shape[2] == 0:
            return other if self.bias.shape[2] == 0 else self
        return Tokens(*(torch.cat(pair, 2) for pair in zip(self, other, strict=True)))

    def pick(self, index: Tensor) -> Tokens:
        """Those of the numbers (B, H, n)."""
        return Tokens(picked(self.key, index), picked(self.value, index), self.bias.gather(-1, index))

    def cut(self, start: int, stop: int) -> Tokens:
        """Consecutive ones."""
        return Tokens(*(x[:, :, start:stop] for x in self))


def picked(x: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, H, L, ·) by number (B, H, n)."""
    return torch.take_along_dim(x, index.unsqueeze(-1), dim=2)


@dataclass(frozen=True, eq=False)
class ExactKeys:
    """The latest keys of a stream and its heavy ones, beside the sums of all others."""

    heavy: Tokens  # g of them; free places have bias -inf
    heavy_score: Tensor  # (B, H, g), their scores as they left the neighbourhood; -inf for free places
    recent: Tokens  # those of the block before the current one and of the current one, at most 2w
    recent_mass: Tensor  # (B, H, r), how much they were attended to so far
    rule: Exact  # which keys are kept

    @classmethod
    def empty(cls, rule: Exact, key: Tensor, value: Tensor) -> ExactKeys:
        """No keys, for tokens like these (B, H, L, ·)."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        few, none = key.new_zeros(*key.shape[:2], rule.num_heavy, 1), key.new_zeros(*key.shape[:2], 0).to(dtype)
        free = few.squeeze(-1).to(dtype) - torch.inf
        heavy_key, heavy_value = (few.expand(-1, -1, -1, x.shape[-1]).clone() for x in (key, value))
        heavy = Tokens(heavy_key, heavy_value, free)
        return cls(heavy, free.clone(), Tokens(key[:, :, :0], value[:, :, :0], none), none.clone(), rule)

    def tokens(self) -> Tokens:
        """All of them, g + r; free places have bias -inf."""
        return self.heavy.then(self.recent)

    def decay(self, log_factor: Tensor) -> ExactKeys:
        """All weights times exp(log_factor), (B or 1, H or 1); scores and masses compare keys and stay.

        By -inf heavy keys leave free places, and the latest ones are masked.
        """
        shift = log_factor.unsqueeze(-1).to(self.recent.bias.dtype)
        heavy = self.heavy._replace(bias=self.heavy.bias + shift)
        score = torch.where(shift == -torch.inf, -torch.inf, self.heavy_score)
        return replace(self, heavy=heavy, heavy_score=score, recent=self.recent._replace(bias=self.recent.bias + shift))

    def each(self, change: Callable[[Tensor], Tensor]) -> ExactKeys:
        """The same with each tensor changed alike."""
        return _from_leaves(map(change, _leaves(self)[0]), self.rule)


def _leaves(keys: ExactKeys) -> tuple[list[Tensor], Exact]:
    """Its tensors, in order, and its rule."""
    return [*keys.heavy, keys.heavy_score, *keys.recent, keys.recent_mass], keys.rule


def _from_leaves(tensors: Iterable[Any], rule: Exact) -> ExactKeys:
    """Exact keys from what torch's tree utilities took out of some."""
    *heavy, score, key, value, bias, mass = tensors
    return ExactKeys(Tokens(*heavy), score, Tokens(key, value, bias), mass, rule)


torch.serialization.add_safe_globals([ExactKeys, Tokens])


def with_places(flatten: Callable[[Any], tuple[list[Any], Any]]) -> Callable[[Any], Any]:
    """The same leaves by their places, as torch.export names what it is given."""

    def flattened(x: Any) -> Any:
        """Each leaf beside its place, and what is no leaf."""
        leaves, context = flatten(x)
        return [(pytree.SequenceKey(place), leaf) for place, leaf in enumerate(leaves)], context

    return flattened


pytree.register_pytree_node(
    ExactKeys,
    _leaves,
    _from_leaves,
    flatten_with_keys_fn=with_places(_leaves),
    serialized_type_name="linattn.ExactKeys",
    to_dumpable_context=lambda rule: rule.label,
    from_dumpable_context=parse_exact,
)
