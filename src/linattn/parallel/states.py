"""Exchange of states between ranks: the state of each part, and by how much it makes earlier ones fade.

Letters: B batch, H key/value heads, Dv value width, R features, M exponents kept per head, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention import State
from linattn.parallel.collectives import gather
from linattn.parallel.ranks import Ranks


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
    """The spans of all ranks by one all-gather, each in the order of the ranks, and the anchor.

    Exponents travel beside the sums: a maximum over all ranks would be a collective more, and has no gradient.
    """
    packed = [_packed(span) for span in spans]
    every, anchor = gather(ranks, torch.cat(packed, -1), anchor)
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
