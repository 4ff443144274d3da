"""A rank's part of a sequence, and the states that ranks exchange; letters as in parallel/__init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention import State, linear_attention_with_state
from linattn.attention._check import check_map, checked_for
from linattn.attention.backends import Call, choose
from linattn.attention.bound_map import bind
from linattn.feature_maps import FeatureMap
from linattn.parallel.ranks import Gather, Ranks
from linattn.positions import Gates, gate_bias, gated_attention_with_state
from linattn.positions.gates import spans
from linattn.softmax.precision import outside_autocast


class Span(NamedTuple):
    """Consecutive tokens as later ones see them."""

    state: State
    log_decay: Tensor | None  # (B or 1, H), what all earlier weights are multiplied by; None without gates

    def then(self, later: Span) -> Span:
        """Span of these tokens and the later ones."""
        if later.log_decay is None or self.log_decay is None:
            return Span(self.state.merge(later.state), None)
        state = self.state.decay(later.log_decay).merge(later.state)
        return Span(state, self.log_decay + later.log_decay)


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
    for span in spans:
        nothing = nothing.then(span)
    return nothing.state


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
        tokens: tuple[Tensor, Tensor, Tensor],
        feature_map: FeatureMap,
        weights: tuple[Tensor | None, Tensor | None],  # mask and bias of the keys
        gates: Gates | None,
        *,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Part:
        """The tokens of a call, wrong ones refused."""
        check_map(feature_map)
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
            return Span(self._after(feature_map, span.state, self.bias, backend), None)
        for at in spans(self.gates.log_forget):
            part = self.keys(at)
            bias, log_decay = gate_bias(self.gates.cut(at), key_mask=part.key_mask)
            if part.bias is not None:
                bias = torch.where(part.bias == -torch.inf, -torch.inf, bias)
            decayed = span.state.decay(log_decay)
            state = part._after(feature_map, decayed, bias.expand(part.key.shape[:3]), backend)
            assert span.log_decay is not None
            span = Span(state, span.log_decay + log_decay)
        return span

    def attended(self, feature_map: FeatureMap, before: State, window: int | None, backend: str) -> Tensor:
        """The causal rows over a state's keys and these, (B, H, Lq, Dv)."""
        query, key, value, bias, gates = self
        tokens = query, key, value, feature_map
        if gates is None:
            return linear_attention_with_state(
                *tokens, before, key_bias=bias, enable_gqa=True, window=window, backend=backend
            ).out
        return gated_attention_with_state(
            *tokens, gates, before, key_mask=self.key_mask, enable_gqa=True, window=window, backend=backend
        ).out

    def read(self, feature_map: FeatureMap, state: State, backend: str) -> Tensor:
        """The rows over a state's keys alone, (B, H, Lq, Dv)."""
        query = self.query.unflatten(1, (self.key.shape[1], -1))
        call = self._call(feature_map, query, None)
        with outside_autocast(query.device):
            return choose(backend, call).read(call, state.sums).out.flatten(1, 2)

    @property
    def key_mask(self) -> Tensor | None:
        """(B, Lk) bool; beside gates a bias is a mask's."""
        return None if self.bias is None else self.bias[:, 0] != -torch.inf

    def _after(self, feature_map: FeatureMap, before: State, bias: Tensor | None, backend: str) -> State:
        """The state after the keys."""
        call = self._call(feature_map, self.key.unsqueeze(2), bias)
        with outside_autocast(self.key.device):
            return State(*choose(backend, call).absorb(call, before.sums), before.built_with)

    def _call(self, feature_map: FeatureMap, query: Tensor, bias: Tensor | None) -> Call:
        """The keys, and queries (B, Hkv, G, L, D), as backends take them."""
        bound = bind(feature_map, self.key, self.key, is_causal=True)
        return Call(bound, query, self.key, self.value, bias, is_causal=True)
