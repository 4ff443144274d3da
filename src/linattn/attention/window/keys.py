"""The keys a state keeps apart from its sums; letters as in window/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn.softmax.row_groups import RowGroups
from linattn.softmax.tokens import Tokens, with_places


@dataclass(frozen=True, eq=False)
class WindowKeys:
    """The latest keys of a stream, beside the sums of all others."""

    recent: Tokens  # those of the block before the current one and of the current one, at most 2w
    width: int  # w

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the fields that a file or a copy has; they are checked where the state is used."""
        self.__dict__.update({field.name: state.get(field.name) for field in fields(self)})

    @classmethod
    def empty(cls, width: int, key: Tensor, value: Tensor) -> WindowKeys:
        """No keys, for tokens like these (B, H, L, ·)."""
        none = key.new_zeros(*key.shape[:2], 0, dtype=torch.promote_types(key.dtype, torch.float32))
        return cls(Tokens(key[:, :, :0], value[:, :, :0], none), width)

    def tokens(self) -> Tokens:
        """All of them."""
        return self.recent

    def decay(self, log_factor: Tensor) -> WindowKeys:
        """All weights times exp(log_factor), (B or 1, H or 1); by -inf the keys are masked."""
        shift = log_factor.unsqueeze(-1).to(self.recent.bias.dtype)
        return replace(self, recent=self.recent._replace(bias=self.recent.bias + shift))

    def each(self, change: Callable[[Tensor], Tensor]) -> WindowKeys:
        """Apply a change to every tensor."""
        return _from_leaves(map(change, self.recent), self.width)


def decayed(keys: WindowKeys | RowGroups[WindowKeys], log_factor: Tensor) -> WindowKeys | RowGroups[WindowKeys]:
    """Keys whose weights are multiplied by exp(log_factor), (B or 1, H or 1)."""
    if isinstance(keys, WindowKeys):
        return keys.decay(log_factor)
    is_one = log_factor.shape[0] == 1
    return keys.by_group(lambda group, rows: group.decay(log_factor if is_one else log_factor[list(rows)]))


def width_of(keys: WindowKeys | RowGroups[WindowKeys]) -> int:
    """w."""
    return keys.width if isinstance(keys, WindowKeys) else keys.keys[0].width


def _leaves(keys: WindowKeys) -> tuple[list[Tensor], int]:
    """The tensors, in order, and the width."""
    return list(keys.recent), keys.width


def _from_leaves(tensors: Iterable[Any], width: int) -> WindowKeys:
    """A window's keys from what torch's tree utilities took out of some."""
    return WindowKeys(Tokens(*tensors), width)


torch.serialization.add_safe_globals([WindowKeys])
pytree.register_pytree_node(
    WindowKeys,
    _leaves,
    _from_leaves,
    flatten_with_keys_fn=with_places(_leaves),
    serialized_type_name="linattn.WindowKeys",
    to_dumpable_context=str,
    from_dumpable_context=int,
)
