"""A rank's part of a sequence, and the states and tokens that ranks exchange.

A window's blocks of w tokens are counted from the first token of the sequence, wherever a part begins. A rank's view is
its part and the tokens around it that its rows see exactly: those of its first block and of the block before, and where
later keys are seen, those of its last block and of the block after. They are sent to it, and the states it reads hold
all others. Letters as in parallel/__init__.py, w tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.attention import State, linear_attention_with_state
from linattn.attention.backends import Call, choose
from linattn.attention.checking import checked_for
from linattn.attention.window import WindowKeys, attend_around
from linattn.feature_maps import FeatureMap
from linattn.parallel.ranks import Exchange, Gather, Ranks
from linattn.positions import Gates, gate_bias, gated_attention_with_state
from linattn.positions.gates import checked_gates, spans
from linattn.softmax import combine
from linattn.softmax.attention import inert
from linattn.softmax.checking import KeyWeights, Qkv
from linattn.softmax.precision import accumulation_dtype, outside_autocast
from linattn.softmax.tracing import has_values


class Span(NamedTuple):
    """Consecutive tokens as later ones see them."""

    state: State
    log_decay: Tensor | None  # (B or 1, H), what all earlier weights are multiplied by; None without gates

    def then(self, later: Span) -> Span:
        """Span of these tokens and the later ones."""
        if later.log_decay is None or self.log_decay is None:
            return Span(self.state.merge(later.state), None)
        return Span(self.state.decay(later.log_decay).merge(later.state), self.log_decay + later.log_decay)


def gathered(ranks: Ranks, spans: list[Span], anchor: Tensor) -> tuple[list[list[Span]], Tensor]:
    """The spans of all ranks by one all-gather, exponents beside sums, each in the order of the ranks; the anchor."""
    # A maximum of exponents over all ranks would be a collective more, and has no gradient.
    packed = [_packed(span) for span in spans]
    every, anchor = Gather.apply(ranks, torch.cat(packed, -1), anchor)
    columns = every.split([x.shape[-1] for x in packed], -1)
    return [[_unpacked(one, span) for one in column] for column, span in zip(columns, spans, strict=True)], anchor


def _packed(span: Span) -> Tensor:
    """A span as numbers, (B, H, R·Dv + R + M), and one more with gates."""
    (S, z, m), batch = span.state.sums, span.state.S.shape[0]
    decay = [] if span.log_decay is None else [span.log_decay.to(z.dtype).expand(batch, -1).unsqueeze(-1)]
    return torch.cat([S.flatten(2), z, m.detach(), *decay], -1)


def _unpacked(packed: Tensor, like: Span) -> Span:
    """Inverse of `_packed`: a span."""
    S, z, m = like.state.sums
    sizes = [S.shape[2] * S.shape[3], z.shape[-1], m.shape[-1]]
    of_S, of_z, of_m, decay = packed.split([*sizes, packed.shape[-1] - sum(sizes)], -1)
    state = State(of_S.unflatten(-1, S.shape[2:]), of_z, of_m.detach(), like.state.built_with)
    return Span(state, None if like.log_decay is None else decay.squeeze(-1))


def joined(spans: list[Span], nothing: Span) -> State:
    """The state of all of them in order, after nothing."""
    return reduce(Span.then, spans, nothing).state


class Part(NamedTuple):
    """Tokens, checked."""

    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    bias: Tensor | None  # (B, Hkv or 1, Lk), -inf for masked keys; beside gates of masks alone
    gates: Gates | None

    @classmethod
    def checked(
        cls,
        tokens: Qkv,
        feature_map: FeatureMap,
        weights: KeyWeights,
        gates: Gates | None,
        *,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Part:
        """The tokens of a call, wrong ones refused."""
        query, key, value, bias = checked_for(feature_map, tokens, *weights, enable_gqa=enable_gqa)
        if is_causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"causally a rank's queries stand beside its keys, got {query.shape[2]} queries and {key.shape[2]} "
                "keys; give the same tokens to both, or is_causal=False"
            )
        if gates is not None and (not is_causal or weights[1] is not None):
            raise ValueError(
                "gates make earlier keys fade and are the keys' biases, got "
                f"is_causal={is_causal} and key_bias {'given' if weights[1] is not None else 'None'}; with gates give "
                "is_causal=True and no key_bias"
            )
        if gates is not None:
            beside = zip(checked_gates(gates, weights[0], key), gates, strict=True)
            # 0 at masked tokens, whatever they held.
            gates = Gates(*(x.to(like.dtype) for x, like in beside if x is not None and like is not None))
        with torch.no_grad():
            statistics = feature_map.call_tensors(query.detach(), key.detach(), key_mask=None, is_causal=False)
        if statistics:
            raise ValueError(
                f"{type(feature_map).__name__} takes {', '.join(statistics)} from all tokens of a call, and a rank has "
                "some of them; fit it to a sample first, or give each rank whole sequences"
            )
        return cls(query, key, value, bias, gates)

    def keys(self, at: slice) -> Part:
        """Some of the keys, and no queries."""
        gates = None if self.gates is None else self.gates.cut(at)
        bias = None if self.bias is None else self.bias[..., at]
        return Part(self.query[:, :, :0], self.key[:, :, at], self.value[:, :, at], bias, gates)

    def nothing(self, feature_map: FeatureMap) -> Span:
        """The span of no tokens like these."""
        (batch, heads, _, width), dtype, device = self.value.shape, self.key.dtype, self.key.device
        state = State.empty(feature_map, batch_size=batch, num_heads=heads, value_dim=width, dtype=dtype, device=device)
        return Span(state, None if self.gates is None else state.m.new_zeros(batch, heads))

    def absorbed(self, feature_map: FeatureMap, backend: str) -> Span:
        """The span of the keys."""
        span = self.nothing(feature_map)
        if self.gates is None:
            return Span(span.state.with_keys(feature_map, self[1:4], backend=backend), None)
        for at in spans(self.gates.log_forget):
            part = self.keys(at)
            bias, log_decay = gate_bias(self.gates.cut(at), key_mask=part.key_mask)
            if part.bias is not None:
                bias = torch.where(part.bias == -torch.inf, -torch.inf, bias)
            decayed = span.state.decay(log_decay).without(None)
            keys = part.key, part.value, bias.to(decayed.m).expand(part.key.shape[:3])
            state = decayed.with_keys(feature_map, keys, backend=backend)
            assert span.log_decay is not None
            span = Span(state, span.log_decay + log_decay)
        return span

    def attended(self, feature_map: FeatureMap, before: State, window: int | None, backend: str) -> Tensor:
        """The causal rows over a state's keys and these, (B, H, Lq, Dv)."""
        tokens = *self[:3], feature_map
        options: Any = {"enable_gqa": True, "window": window, "backend": backend}
        if self.gates is None:
            return linear_attention_with_state(*tokens, before, key_bias=self.bias, **options).out
        return gated_attention_with_state(*tokens, self.gates, before, key_mask=self.key_mask, **options).out

    def read(self, feature_map: FeatureMap, state: State, backend: str) -> Tensor:
        """The rows over a state's keys alone, (B, H, Lq, Dv)."""
        query = self.query.unflatten(1, (self.key.shape[1], -1))
        call = Call.causal(feature_map, query, self.key, self.value)
        with outside_autocast(query.device):
            return choose(backend, call).read(call, state.sums).out.flatten(1, 2)

    @property
    def key_mask(self) -> Tensor | None:
        """(B, Lk) bool; beside gates a bias is a mask's."""
        return None if self.bias is None else self.bias[:, 0] != -torch.inf


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
    if rows := (bias[..., 0] == -torch.inf).all(1).nonzero().flatten().tolist():
        raise ValueError(
            f"a window's blocks are counted from a row's first live token, and across ranks from the first one of all; "
            f"got rows {rows[:8]} that begin with a masked token: pad on the right"
        )


def attend_causally(
    ranks: Ranks, view: Part, views: Views, feature_map: FeatureMap, window: int, backend: str
) -> Tensor:
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


def attend_both_ways(
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
    call = Call.causal(feature_map, query, key, value, view.bias).weighed(is_part=True)
    with outside_autocast(key.device):
        partial = combine(*attend_around(call, choose(backend, call), window, (before.sums, after.sums)))
    return partial.out.flatten(1, 2)[:, :, num_before : num_before + length].to(value.dtype)


def with_neighbours(ranks: Ranks, part: Part, views: Views) -> Part:
    """The part's queries with the keys of its view, by one all-to-all."""
    rank, packed = ranks.rank, _packed_tokens(part)
    per_token = packed.shape[0] * packed.shape[1] * packed.shape[3]
    sent = [packed[:, :, views.shared(rank, reader)].flatten() for reader in range(ranks.size)]
    shared = [views.shared(holder, rank) for holder in range(ranks.size)]
    received = [per_token * (at.stop - at.start) for at in shared]
    flat, query = Exchange.apply(ranks, tuple(map(len, sent)), tuple(received), torch.cat(sent), part.query)
    pieces = [piece.view(*packed.shape[:2], -1, packed.shape[3]) for piece in flat.split(received)]
    pieces[rank] = packed
    return _unpacked_tokens(torch.cat(pieces, 2), part._replace(query=query))


def _packed_tokens(part: Part) -> Tensor:
    """Keys, values, biases and gates side by side, (B, Hkv, L, ·), in a dtype that holds all."""
    shape, dtype = part.key.shape[:3], accumulation_dtype(part.key.dtype)
    bias = part.key.new_zeros(shape, dtype=dtype) if part.bias is None else part.bias.expand(shape)
    columns = [bias] if part.gates is None else [bias, *(x.expand(shape) for x in part.gates if x is not None)]
    return torch.cat((part.key, part.value, torch.stack(columns, -1)), -1)


def _unpacked_tokens(packed: Tensor, like: Part) -> Part:
    """Inverse of `_packed_tokens`: a part's tokens, with the queries of `like`."""
    widths = like.key.shape[-1], like.value.shape[-1]
    key, value, columns = packed.split((*widths, packed.shape[-1] - sum(widths)), -1)
    key, value = key.to(like.key.dtype), value.to(like.value.dtype)
    bias, *gates = columns.unbind(-1)
    if like.gates is None:
        return Part(like.query, key, value, bias, None)
    return Part(like.query, key, value, bias[:, :1], Gates(gates[0], gates[1] if gates[1:] else None))
