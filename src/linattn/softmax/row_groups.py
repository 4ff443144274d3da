"""Rows that began at different tokens: what a stream keeps of them, and exact windows counted from each one's first.

Causally rows are taken in groups that begin at the same token, and the masked tokens before it are cut off. Where every
key is in view, and in graphs and transforms, where a mask has no values yet, rows are turned to begin with that token;
a stream that begins there counts its blocks from the first position instead. Letters as in softmax/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from linattn.softmax.precision import accumulation_dtype
from linattn.softmax.tokens import Tokens, register
from linattn.softmax.tracing import has_values


class StreamKeys(Protocol):
    """Keys that a stream keeps of some rows, of which the latest tokens are exact."""

    @property
    def recent(self) -> Tokens:
        """The latest tokens."""

    def tokens(self) -> Tokens:
        """All of them."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a change to every tensor."""


K = TypeVar("K", bound=StreamKeys)


@dataclass(frozen=True, eq=False)
class RowGroups(Generic[K]):
    """The keys of each group of rows whose first live token is the same one, from which their blocks are counted."""

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
        for place, (key, value, bias) in enumerate(parts):
            rest = most - bias.shape[2]
            key, value = (pad(x, (0, 0, 0, rest)) for x in (key, value))
            parts[place] = Tokens(key, value, pad(bias, (0, rest), value=-torch.inf))
        return Tokens(*(in_order(self.rows, x) for x in zip(*parts, strict=True)))

    def each(self, change: Callable[[Tensor], Tensor]) -> RowGroups[K]:
        """Apply a change to every tensor."""
        return RowGroups(self.rows, tuple(keys.each(change) for keys in self.keys))

    def select(self, indices: Tensor) -> K | RowGroups[K]:
        """The rows of these numbers, in that order."""
        if len(self.rows) == 1:
            # All rows in order: no number has to be looked at, which a graph does not know.
            chosen = self.keys[0].each(lambda x: x.index_select(0, indices))
            return RowGroups.joined([(tuple(range(len(indices))), chosen)])
        number, groups, chosen_rows = sum(map(len, self.rows)), [], indices.tolist()
        if not all(0 <= row < number for row in chosen_rows):
            raise IndexError(f"indices must lie in [0, {number}), the rows of the state, got {chosen_rows}")
        for rows, keys in zip(self.rows, self.keys, strict=True):
            place = {row: number for number, row in enumerate(rows)}
            places = tuple(new for new, row in enumerate(chosen_rows) if row in place)
            groups.append((places, rows_of(keys, [place[chosen_rows[new]] for new in places])))
        return RowGroups.joined([group for group in groups if group[0]] or groups[:1])


def has_begun(keys: StreamKeys) -> bool:
    """Whether a stream has had a token: the latest is among its recent keys."""
    return keys.recent.bias.shape[2] > 0


def rows_of(keys: K, places: Sequence[int]) -> K:
    """Some rows of what a stream keeps."""
    index = _index(places, keys.recent.bias)
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


def check_next_tokens(
    held: tuple[int, ...], dtype: torch.dtype, device: torch.device, key: Tensor, value: Tensor, remedy: str
) -> None:
    """Refuse tokens that a state does not go on with: of other sizes (B, H, Dv), dtype (with a remedy) or device."""
    got, wanted = (*key.shape[:2], value.shape[-1]), accumulation_dtype(key.dtype)
    if held != got:
        raise ValueError(
            f"the state holds (batch, key/value heads, value width) = {held}, got keys and values of {got}; "
            "begin a new state, or select its rows"
        )
    if dtype != wanted:
        raise ValueError(f"the state is kept in {dtype}, tokens of {key.dtype} need {wanted}; {remedy}")
    if device != key.device:
        raise ValueError(f"the state is on {device}, the keys on {key.device}; move it with state.to(…)")


register(
    RowGroups,
    lambda groups: (list(groups.keys), groups.rows),
    lambda keys, rows: RowGroups(tuple(map(tuple, rows)), tuple(keys)),
    to_dumpable_context=lambda rows: [list(group) for group in rows],
    from_dumpable_context=lambda rows: tuple(map(tuple, rows)),
)


# A named tuple with query (B, H, G, Lq, D), key (B, H, Lk, D), value (B, H, Lk, Dv), bias (B, H or 1, Lk) or None, and
# is_causal; mypy knows no protocol of `_replace`.
Call = Any


class Streamed(NamedTuple, Generic[K]):
    """Result of a causal call: rows (B, H, G, Lq, ·), sums if it has a map, and the keys after all."""

    out: Tensor
    log_normalizer: Tensor | None
    sums: Sequence[Tensor]  # (B, …)
    keys: K | RowGroups[K]


class _Group(NamedTuple, Generic[K]):
    """Rows that begin at the same token."""

    rows: tuple[int, ...]
    first: int  # tokens of the call before it, all of them where there is none yet
    keys: K


def attend_by_groups(
    call: Call,
    sums: Sequence[Tensor],
    keys: K | RowGroups[K] | None,  # of a stream, None where it begins
    nothing: Callable[[], K],
    attend: Callable[[Call, Sequence[Tensor], K], Streamed[K]],
    *,
    turns: bool = False,
) -> Streamed[K]:
    """`attend` on each group of rows, its blocks counted from its first live token; on all of them if that is one."""
    # Where nobody reads the sums, a mask without values yet may turn rows by what it will hold.
    if turns and call.bias is not None and not has_values(call.bias):
        return Streamed(*turned(call, lambda each: attend(each, sums, nothing())[:2]), sums, nothing())
    groups = _groups(call, keys, nothing)
    if not isinstance(groups, list):
        return attend(call, sums, groups)
    length, parts = call.key.shape[2], []
    for rows, first, group_keys in groups:
        before = [x.index_select(0, _index(rows, x)) for x in sums]
        is_waiting = first == length
        part = attend(rows_from(call, rows, 0 if is_waiting else first), before, group_keys)
        parts.append(part._replace(sums=before, keys=group_keys) if is_waiting else part)
    return _together(call.query.shape[3], [group.rows for group in groups], parts)


def turned(call: Call, attend: Callable[[Call], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """`attend` on rows turned so that they begin with their first live token, its results turned back."""
    bias, (num_queries, length) = call.bias, (call.query.shape[3], call.key.shape[2])
    if bias is None or length == 0:
        return attend(call)
    first = _first_live(bias)
    if has_values(bias) and not bool((first % length).any()):
        return attend(call)
    place = torch.arange(length, device=bias.device)
    there, back = ((place + turn.unsqueeze(-1)) % length for turn in (first, -first))
    query = pad(call.query, (0, 0, length - num_queries, 0))
    query = query.gather(3, there[:, None, None, :, None].expand_as(query))
    key, value = (x.gather(2, there[:, None, :, None].expand_as(x)) for x in (call.key, call.value))
    bias = bias.gather(2, there.unsqueeze(1).expand_as(bias))
    out, log = attend(call._replace(query=query, key=key, value=value, bias=bias))
    # Causally the queries before that token see no key.
    blind = (place < first.unsqueeze(-1))[:, None, None, length - num_queries :] & call.is_causal
    back = back[:, None, None, length - num_queries :]
    out = out.gather(3, back.unsqueeze(-1).expand(*out.shape[:3], -1, out.shape[4])).masked_fill(blind.unsqueeze(-1), 0)
    if log is not None:
        log = log.gather(3, back.expand(*log.shape[:3], -1)).masked_fill(blind, -torch.inf)
    return out, log


def _groups(call: Call, keys: K | RowGroups[K] | None, nothing: Callable[[], K]) -> K | list[_Group[K]]:
    """The call's rows by where they begin; the keys of all where that is the call's first token."""
    (num_rows, _, length), bias = call.key.shape[:3], call.bias
    if keys is None:
        every: K = nothing()
        if length and (bias is None or not has_values(bias)):
            return every
        keys = RowGroups((tuple(range(num_rows)),), (every,))
    if not isinstance(keys, RowGroups):
        return keys
    groups = []
    for rows, group_keys in zip(keys.rows, keys.keys, strict=True):
        if has_begun(group_keys):
            groups.append(_Group(rows, 0, group_keys))
        else:
            groups += _beginning(rows, group_keys, _starts(bias, num_rows))
    if len(groups) == 1 and groups[0].first == 0 < length:
        # As many rows as there are, in their order.
        return groups[0].keys
    return groups


def _beginning(rows: tuple[int, ...], keys: K, starts: list[int]) -> list[_Group[K]]:
    """Rows without a token so far, in groups."""
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(starts[row], []).append(place)
    if len(places) <= 1:
        return [_Group(rows, next(iter(places), 0), keys)]
    return [
        _Group(tuple(rows[x] for x in group_places), first, rows_of(keys, group_places))
        for first, group_places in places.items()
    ]


def _starts(bias: Tensor | None, num_rows: int) -> list[int]:
    """How many tokens are before each row's first live one; none where the mask has no values to look at."""
    if bias is None or not has_values(bias):
        return [0] * num_rows
    starts: list[int] = _first_live(bias).tolist()
    return starts


def _first_live(bias: Tensor) -> Tensor:
    """How many tokens before the first live one are masked for all heads, (B,), by biases (B, H or 1, L)."""
    return (bias == -torch.inf).all(1).cumprod(-1).sum(-1)


def rows_from(call: Call, rows: tuple[int, ...], first: int) -> Call:
    """Some rows of a call, from a token on."""
    query, key, value, bias = call.query, call.key, call.value, call.bias
    if len(rows) < len(key):
        index = _index(rows, key)
        query, key, value = (x.index_select(0, index) for x in (query, key, value))
        bias = None if bias is None else bias.index_select(0, index)
    bias = None if bias is None else bias[..., first:]
    unseen = max(first - (key.shape[2] - query.shape[3]), 0)
    return call._replace(query=query[:, :, :, unseen:], key=key[:, :, first:], value=value[:, :, first:], bias=bias)


def _together(num_queries: int, rows: list[tuple[int, ...]], parts: Sequence[Streamed[K]]) -> Streamed[K]:
    """Results of groups as one; queries before a row's first live token see nothing."""
    missing = [num_queries - part.out.shape[3] for part in parts]
    out = in_order(rows, [pad(part.out, (0, 0, n, 0)) for part, n in zip(parts, missing, strict=True)])
    logs = [part.log_normalizer for part in parts if part.log_normalizer is not None]
    log = None
    if logs:
        log = in_order(rows, [pad(x, (n, 0), value=-torch.inf) for x, n in zip(logs, missing, strict=True)])
    sums = [in_order(rows, x) for x in zip(*(part.sums for part in parts), strict=True)]
    keys = [part.keys for part in parts if not isinstance(part.keys, RowGroups)]
    return Streamed(out, log, sums, RowGroups.joined(list(zip(rows, keys, strict=True))))


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    """Numbers where a tensor is."""
    return torch.tensor(rows, dtype=torch.int64, device=like.device)
