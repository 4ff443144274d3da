"""Streams whose rows began at different tokens; letters as in softmax/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from linattn.softmax.tokens import Tokens, with_places


class StreamKeys(Protocol):
    """Keys that a stream keeps of some rows, of which the latest tokens are exact."""

    @property
    def recent(self) -> Tokens:
        """The latest tokens."""
        ...

    def tokens(self) -> Tokens:
        """All of them."""
        ...

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a change to every tensor."""
        ...


K = TypeVar("K", bound=StreamKeys)


@dataclass(frozen=True, eq=False)
class RowGroups(Generic[K]):
    """The keys of each group of rows whose first live token is the same one.

    The blocks of a group are counted from that token. Rows that have had none yet have no recent keys.
    """

    rows: tuple[tuple[int, ...], ...]  # of each group, numbers in the batch
    keys: tuple[K, ...]  # of each group, its rows in this order

    @classmethod
    def joined(cls, groups: Sequence[tuple[tuple[int, ...], K]]) -> K | RowGroups[K]:
        """The keys of groups that are all rows; those of one group that has begun as they are."""
        rows, keys = zip(*groups, strict=True)
        if len(rows) == 1 and rows[0] == tuple(range(len(rows[0]))) and has_begun(keys[0]):
            only: K = keys[0]
            return only
        return cls(rows, keys)

    def tokens(self) -> Tokens:
        """All keys by row; where a group has fewer there are free places, of bias -inf."""
        parts = [keys.tokens() for keys in self.keys]
        most = max(part.bias.shape[2] for part in parts)
        filled = [_filled(part, most - part.bias.shape[2]) for part in parts]
        return Tokens(*(in_order(self.rows, x) for x in zip(*filled, strict=True)))

    def by_group(self, change: Callable[[K, tuple[int, ...]], K]) -> RowGroups[K]:
        """The keys of each group changed by a function of them and their rows."""
        return RowGroups(self.rows, tuple(map(change, self.keys, self.rows)))

    def each(self, change: Callable[[Tensor], Tensor]) -> RowGroups[K]:
        """Apply a change to every tensor."""
        return RowGroups(self.rows, tuple(keys.each(change) for keys in self.keys))

    def select(self, indices: Sequence[int]) -> K | RowGroups[K]:
        """The rows of these numbers, in that order."""
        groups = []
        for rows, keys in zip(self.rows, self.keys, strict=True):
            place = {row: number for number, row in enumerate(rows)}
            chosen = tuple(new for new, row in enumerate(indices) if row in place)
            groups.append((chosen, rows_of(keys, [place[indices[new]] for new in chosen])))
        return RowGroups.joined([group for group in groups if group[0]] or groups[:1])


def has_begun(keys: StreamKeys) -> bool:
    """Whether a stream has had a token: the latest is among its recent keys."""
    return keys.recent.bias.shape[2] > 0


def rows_of(keys: K, places: Sequence[int]) -> K:
    """Some rows of what a stream keeps."""
    index = torch.tensor(places, dtype=torch.int64, device=keys.recent.bias.device)
    return keys.each(lambda x: x.index_select(0, index))


def in_order(rows: Sequence[tuple[int, ...]], parts: Sequence[Tensor]) -> Tensor:
    """Tensors (n, …) of groups of rows as one (B, …)."""
    whole, order = torch.cat(list(parts)), [row for group in rows for row in group]
    if order == sorted(order):
        return whole
    places = sorted(range(len(order)), key=order.__getitem__)
    return whole.index_select(0, torch.tensor(places, device=whole.device))


def check_groups(groups: RowGroups[Any], batch: int, remedy: str) -> None:
    """Refuse groups that do not hold each of so many rows once and in order."""
    rows, keys = groups.rows, groups.keys
    are_tuples = all(type(x) is tuple for x in (rows, keys)) and all(type(group) is tuple for group in rows)
    numbers = [row for group in rows for row in group] if are_tuples else []
    if (
        not are_tuples
        or not 0 < len(rows) == len(keys)
        or any(type(row) is not int for row in numbers)
        or sorted(numbers) != list(range(batch))
        or any(list(group) != sorted(group) for group in rows)
    ):
        raise ValueError(
            f"the state's rows must be groups of the numbers of {batch} rows, each in one group, and keys those of "
            f"each group, got rows {rows}; {remedy}"
        )


def _filled(tokens: Tokens, number: int) -> Tokens:
    """Tokens, and so many free places."""
    key, value = (pad(x, (0, 0, 0, number)) for x in tokens[:2])
    return Tokens(key, value, pad(tokens.bias, (0, number), value=-torch.inf))


def _leaves(groups: RowGroups[Any]) -> tuple[list[Any], tuple[tuple[int, ...], ...]]:
    """The groups' keys, and which rows they are of."""
    return list(groups.keys), groups.rows


def _from_leaves(keys: Iterable[Any], rows: Iterable[Iterable[int]]) -> RowGroups[Any]:
    """Row groups from what torch's tree utilities took out of some."""
    return RowGroups(tuple(map(tuple, rows)), tuple(keys))


# Read by torch.load under weights_only: tensors and numbers.
torch.serialization.add_safe_globals([RowGroups])
pytree.register_pytree_node(
    RowGroups,
    _leaves,
    _from_leaves,
    flatten_with_keys_fn=with_places(_leaves),
    serialized_type_name="linattn.RowGroups",
    to_dumpable_context=lambda rows: [list(group) for group in rows],
    from_dumpable_context=lambda rows: tuple(map(tuple, rows)),
)
