"""Windows across parts: the tokens next to a part are sent to it, all others enter the states.

A window's blocks of w tokens are counted from the first token of the sequence, wherever a part begins. A rank's view is
its part and the tokens around it that its rows see exactly: those of its first block and of the block before, and where
later keys are seen, those of its last block and of the block after. The states it reads hold all tokens outside its
view. Letters as in parallel/__init__.py, w tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends import Call, choose
from linattn.attention.bound_map import bind
from linattn.attention.window import WindowKeys, attend_around
from linattn.feature_maps import FeatureMap
from linattn.parallel.parts import Part, gathered, joined
from linattn.parallel.ranks import Exchange, Ranks
from linattn.positions import Gates
from linattn.softmax import combine
from linattn.softmax.attention import inert
from linattn.softmax.precision import accumulation_dtype, outside_autocast
from linattn.softmax.tracing import has_values


class Views(NamedTuple):
    """Where each rank's part and its view begin and end, in tokens of the sequence."""

    starts: list[int]  # P + 1 of them, the last one where the sequence ends
    firsts: list[int]  # P + 1 of them, the last one for a part after the last
    ends: list[int]  # P of them

    @classmethod
    def of(cls, lengths: Sequence[int], window: int, *, is_causal: bool) -> Views:
        """The views of parts of these lengths."""
        starts = list(accumulate(lengths, initial=0))
        firsts = [max(start // window - 1, 0) * window for start in starts]
        ends = starts[1:] if is_causal else [min((-(-end // window) + 1) * window, starts[-1]) for end in starts[1:]]
        return cls(starts, firsts, ends)

    @classmethod
    def whole(cls, lengths: Sequence[int], *, is_causal: bool) -> Views:
        """The views of those who see everything, or everything before."""
        starts = list(accumulate(lengths, initial=0))
        return cls(starts, [0] * len(starts), starts[1:] if is_causal else [starts[-1]] * len(lengths))

    def shared(self, holder: int, reader: int) -> slice:
        """Which of its own tokens a rank sends to another."""
        if holder == reader:
            return slice(0, 0)
        seen = self.firsts[reader], self.starts[reader]
        seen = seen if holder < reader else (self.starts[reader + 1], self.ends[reader])
        low, high = self.starts[holder], self.starts[holder + 1]
        first, last = (min(max(place, low), high) - low for place in seen)
        return slice(first, max(first, last))


def refuse_left_padding(first: Part) -> None:
    """Refuse rows whose sequence begins with a masked token, as its first part says where that may be looked at."""
    bias = first.bias
    if bias is None or not first.key.shape[2] or not has_values(bias):
        return
    rows = (bias[..., 0] == -torch.inf).all(1).nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"a window's blocks are counted from a row's first live token, and across ranks from the first one of all; "
            f"got rows {rows[:8]} that begin with a masked token: pad on the right"
        )


def attend_with_window(
    ranks: Ranks,
    part: Part,
    feature_map: FeatureMap,
    window: int,
    lengths: Sequence[int],
    backend: str,
    *,
    is_causal: bool,
) -> Tensor:
    """Rows (B, H, L, Dv) with a window alone."""
    views = Views.of(lengths, window, is_causal=is_causal)
    attend = _causal if is_causal else _bidirectional
    return attend(ranks, with_neighbours(ranks, part, views), views, feature_map, window, backend)


def _causal(ranks: Ranks, view: Part, views: Views, feature_map: FeatureMap, window: int, backend: str) -> Tensor:
    """A stream goes on from the state of all tokens before the view, and reads the view's own."""
    rank, first = ranks.rank, views.firsts[ranks.rank]
    sent = view.keys(slice(0 if ranks.is_last else views.firsts[rank + 1] - first))
    (every,), query = gathered(ranks, [sent.absorbed(feature_map, backend)], view.query)
    before = joined(every[:rank], view.nothing(feature_map))
    before = replace(before, window=WindowKeys.empty(window, view.key, view.value))
    num_before = views.starts[rank] - first
    if view.gates is None:
        return view._replace(query=query).attended(feature_map, before, window, backend)
    # Gates want as many queries as keys: rows of the tokens before the part are dropped.
    query = torch.nn.functional.pad(query, (0, 0, num_before, 0))
    return view._replace(query=query).attended(feature_map, before, window, backend)[:, :, num_before:]


def _bidirectional(
    ranks: Ranks, view: Part, views: Views, feature_map: FeatureMap, window: int, backend: str
) -> Tensor:
    """The view's tokens are read from the state before it and from the one after it."""
    rank, first, end = ranks.rank, views.firsts[ranks.rank], views.ends[ranks.rank]
    former = views.ends[rank - 1] if rank else 0
    earlier = view.keys(slice(0 if ranks.is_last else views.firsts[rank + 1] - first))
    later = view.keys(slice(former - first if rank else end - first, None))
    spans = [side.absorbed(feature_map, backend) for side in (earlier, later)]
    (every_earlier, every_later), query = gathered(ranks, spans, view.query)
    nothing = view.nothing(feature_map)
    before, after = joined(every_earlier[:rank], nothing), joined(every_later[rank + 1 :], nothing)
    key, value = inert(view.bias, view.key, view.value)
    num_before, length = views.starts[rank] - first, query.shape[2]
    # As many rows as keys; those of the tokens around the part are dropped.
    query = torch.nn.functional.pad(query, (0, 0, num_before, key.shape[2] - num_before - length))
    query = query.unflatten(1, (key.shape[1], -1))
    call = Call(bind(feature_map, key, key, is_causal=True), query, key, value, view.bias, is_causal=True)
    with outside_autocast(key.device):
        partial = combine(*attend_around(call, choose(backend, call), window, (before.sums, after.sums)))
    return partial.out.flatten(1, 2)[:, :, num_before : num_before + length]


def with_neighbours(ranks: Ranks, part: Part, views: Views) -> Part:
    """The part's queries with the keys of its view, by one all-to-all."""
    rank, packed = ranks.rank, _packed(part)
    per_token = packed.shape[0] * packed.shape[1] * packed.shape[3]
    sent = [packed[:, :, views.shared(rank, reader)].flatten() for reader in range(ranks.size)]
    shared = [views.shared(holder, rank) for holder in range(ranks.size)]
    received = [per_token * (at.stop - at.start) for at in shared]
    sizes = tuple(map(len, sent))
    flat, query = Exchange.apply(ranks, sizes, tuple(received), torch.cat(sent), part.query)
    pieces = [piece.view(*packed.shape[:2], -1, packed.shape[3]) for piece in flat.split(received)]
    pieces[rank] = packed
    return _unpacked(torch.cat(pieces, 2), part._replace(query=query))


def _packed(part: Part) -> Tensor:
    """Keys, values, biases and gates side by side, (B, Hkv, L, ·), in a dtype that holds all."""
    shape, dtype = part.key.shape[:3], accumulation_dtype(part.key.dtype)
    bias = part.key.new_zeros(shape, dtype=dtype) if part.bias is None else part.bias.expand(shape)
    columns = [bias] if part.gates is None else [bias, *(x.expand(shape) for x in part.gates if x is not None)]
    return torch.cat((part.key, part.value, torch.stack(columns, -1)), -1)


def _unpacked(packed: Tensor, like: Part) -> Part:
    """Inverse of `_packed`: a part's tokens, with the queries of `like`."""
    widths = like.key.shape[-1], like.value.shape[-1]
    key, value, columns = packed.split((*widths, packed.shape[-1] - sum(widths)), -1)
    key, value = key.to(like.key.dtype), value.to(like.value.dtype)
    bias, *gates = columns.unbind(-1)
    if like.gates is None:
        return Part(like.query, key, value, bias, None)
    return Part(like.query, key, value, bias[:, :1], Gates(gates[0], gates[1] if gates[1:] else None))
