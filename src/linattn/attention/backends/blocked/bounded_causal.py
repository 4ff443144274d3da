"""The causal fold of bounded features (bounded.py): a segment's blocks share one exponent per head with the sums.

Rows read the sums before their block, and weights 2^{p(q)}·2^{p(k)} of its own keys, which those keys' u and u·v
are multiplied with. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Running
from linattn.attention.backends.blocked.bounded import (
    BoundedKeys,
    are_moderate,
    bounded_keys,
    fits_denominators,
    fits_rows,
    fits_sums,
    parts,
    whole,
    write_powers,
)
from linattn.attention.backends.blocked.features import query_rows
from linattn.attention.backends.blocked.grouped_causal import TokenGradients
from linattn.attention.backends.blocked.joint_causal import JointGradients, JointRows
from linattn.attention.backends.blocked.records import Saved
from linattn.attention.backends.blocked.rows import rows_of, saved_rows, store_rows, times_z
from linattn.attention.sums import Sums
from linattn.feature_maps._powers import Powers


class BoundedSegment(NamedTuple):
    """A segment's tokens relative to one exponent per head."""

    keys: BoundedKeys
    reference: Tensor  # of its rows, (B, H, G, n)
    fits: Tensor  # (B, H) bool


class BoundedRows:
    """Segments of rows, for the heads in which all is bounded; `fold` is what takes the others."""

    def __init__(self, powers: Powers, fold: JointRows) -> None:
        self.powers, self.fold, self.space, self.keys = powers, fold, fold.space, fold.keys
        # (B, H): heads in which a segment was tried in vain are tried no more.
        self.is_hopeful = torch.ones(fold.query.shape[:2], dtype=torch.bool, device=fold.query.device)

    def segment(self, blocks: list[slice], state: Running) -> BoundedSegment:
        """What is known of a segment before any product."""
        tokens, (S, z, m) = whole(blocks), state.views()
        keys = bounded_keys(self.powers, self.keys, tokens, m, self.space)
        term = self.powers.term(self.space.rows("q", self.fold.query[..., tokens, :]))
        fits = keys.fits & fits_rows(self.powers, term) & are_moderate(S, z) & self.is_hopeful
        return BoundedSegment(keys, term.add_(keys.c[..., None, None]), fits)

    def advance(self, blocks: list[slice], found: BoundedSegment, state: Running, rows: Rows) -> Tensor:
        """Fold a segment in and store its rows; the heads (B, H) where that holds."""
        is_empty = (state.views().z == 0).all(-1)
        state.rescale(found.keys.c.unsqueeze(-1).expand(state.m.shape))
        of_blocks = (parts(found.keys.weight, blocks), parts(found.reference, blocks))
        for block, weight, reference in zip(blocks, *of_blocks, strict=True):
            phi_q, phi_k, weights, u = self._block(block, weight)
            weighted = self.keys.weighted_values(block, weight)
            num = self.space.product("num", weights, weighted).baddbmm_(phi_q, state.S)
            den = times_z(weights, u).add_(times_z(phi_q, state.z))
            store_rows(rows, block, num, den, reference)
            state.fold_in_weighted(phi_k, u, weighted)
        den = rows_of(rows, whole(blocks)).den
        holds = fits_denominators(den)
        if not bool(holds.all()):
            holds = fits_denominators(den.masked_fill(self._blind(blocks, is_empty), 1))
        return holds & fits_sums(*state.views()[:2])

    def _block(self, block: slice, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features of queries (B·H, G·n, R) and keys (B·H, n, R), their products where seen, and u (B·H, n)."""
        phi_k = write_powers(self.powers, self.keys.tokens(block), "keys", self.space)
        phi_q = write_powers(self.powers, query_rows(self.fold.query, block, self.space), "queries", self.space)
        weights = self.fold.hide_later_(self.space.product("weights", phi_q, phi_k.mT))
        return phi_q, phi_k, weights, weight.flatten(0, 1)

    def _blind(self, blocks: list[slice], is_empty: Tensor) -> Tensor:
        """(B, H, 1, n): rows that see no key at all, where the sums before the segment are of none."""
        tokens, span = whole(blocks), self.fold.span
        position = torch.arange(tokens.stop - tokens.start, device=is_empty.device)
        masked = self.keys.masked(tokens)
        live = torch.ones_like(position).expand(1, 1, -1) if masked is None else (~masked).long()
        # How many live keys stand among the first of the segment.
        count = torch.cat((torch.zeros_like(live[..., :1]), live.cumsum(-1)), -1)
        seen = count[..., position // span * span if span else position + 1]
        return ((seen == 0) & is_empty.unsqueeze(-1)).unsqueeze(2)


class BoundedGradients(BoundedRows):
    """The gradients of segments of bounded rows."""

    fold: JointGradients

    def __init__(self, powers: Powers, fold: JointGradients, saved: Saved) -> None:
        super().__init__(powers, fold)
        self._saved = saved

    def pull(self, blocks: list[slice], before: Sums, S: Tensor, z: Tensor, tokens: TokenGradients) -> None:
        """Write the gradients of the sums before a segment over those after it; its tokens' are stored."""
        state = Running(before)
        keys = bounded_keys(self.powers, self.keys, whole(blocks), before.m, self.space)
        state.rescale(keys.c.unsqueeze(-1).expand(before.m.shape))
        weights, entries = list(parts(keys.weight, blocks)), []
        for slot, (block, weight) in enumerate(zip(blocks, weights, strict=True)):
            held = (self.space.buffer(f"{slot} {i}", *x.shape).copy_(x) for i, x in enumerate((state.S, state.z)))
            phi_k = write_powers(self.powers, self.keys.tokens(block), f"{slot} keys", self.space)
            entries.append((*held, phi_k))
            if slot + 1 < len(blocks):
                state.fold_in_weighted(phi_k, weight.flatten(0, 1), self.keys.weighted_values(block, weight))
        for block, weight, entry in reversed(list(zip(blocks, weights, entries, strict=True))):
            self._pull_block(block, weight, entry, (S.flatten(0, 1), z.flatten(0, 1)), tokens)
        decay = (before.m - keys.c.unsqueeze(-1)).exp_()
        S.mul_(decay.unsqueeze(-1))
        z.mul_(decay)

    def _pull_block(
        self,
        block: slice,
        weight: Tensor,
        entry: tuple[Tensor, Tensor, Tensor],
        of_sums: tuple[Tensor, Tensor],
        tokens: TokenGradients,
    ) -> None:
        """Add to the gradients of the sums, and store those of a block's tokens."""
        (S, z, phi_k), (grad_S, grad_z), space, u = entry, of_sums, self.space, weight.flatten(0, 1)
        masked, x_k, x_q = self.keys.masked(block), self.keys.tokens(block), query_rows(self.fold.query, block, space)
        phi_q, weighted = write_powers(self.powers, x_q, "queries", space), self.keys.weighted_values(block, weight)
        weights = self.fold.hide_later_(space.product("weights", phi_q, phi_k.mT))
        rows = saved_rows(self._saved, block, phi_q, space)
        grad_num, grad_den = rows.gradients(
            lambda: (weights @ weighted + phi_q @ S, times_z(weights, u) + times_z(phi_q, z)), space
        )
        # Of weights: [grad num, grad den] [v, 1]ᵀ·u where a row sees the key; rows read [S, z] beside them.
        scores = space.product("grad_scores", grad_num, weighted.mT).addcmul_(grad_den, u.unsqueeze(-2))
        scores = self.fold.hide_later_(scores)
        grad_q = space.product("grad_q", grad_num, S.mT).addcmul_(grad_den, z.unsqueeze(-2))
        grad_q = grad_q.baddbmm_(scores, phi_k).mul_(phi_q).view(*x_q.shape[:-1], -1)
        # Keys are read by the sums after the block, whose gradient is given, and by its own rows.
        grad_k = space.product("grad_k", weighted, grad_S.mT).addcmul_(u.unsqueeze(-1), grad_z.unsqueeze(-2))
        grad_k = grad_k.baddbmm_(scores.mT, phi_q).mul_(phi_k).view(*x_k.shape[:-1], -1)
        grad_v = space.product("grad_v", phi_k, grad_S).baddbmm_(weights.mT, grad_num).mul_(u.unsqueeze(-1))
        # Last, since the products above need the gradient of the sums after the block.
        grad_S.baddbmm_(phi_q.mT, grad_num)
        grad_z.unsqueeze(-2).baddbmm_(grad_den.mT, phi_q)
        # out does not change with a factor common to all features of a row, den does.
        tokens.store_query(block, self.powers.vjp(x_q, grad_q, (rows.grad_den * rows.den).unsqueeze(-1)))
        total = grad_k.sum(-1, keepdim=True)
        tokens.store_key(block, masked, self.powers.vjp(x_k, grad_k, total))
        tokens.store_value(block, masked, grad_v.view(*x_k.shape[:-1], -1))
        self.fold.of_bias.store(block, masked, total.squeeze(-1))
