"""The causal fold of bounded features (bounded.py): a segment's blocks share one exponent per head with the sums.

Rows read the sums before their block, and weights 2^{p(q)}·2^{p(k)} of its own keys, which those keys' u and u·v
are multiplied with. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Running, add_product_
from linattn.attention.backends.blocked.bounded import (
    BoundedKeys,
    KeyBlock,
    are_moderate,
    bounded_keys,
    fits_denominators,
    fits_rows,
    fits_sums,
    parts,
    store_bounded,
    whole,
    write_powers,
)
from linattn.attention.backends.blocked.features import query_rows
from linattn.attention.backends.blocked.grouped_causal import TokenGradients
from linattn.attention.backends.blocked.joint_causal import JointGradients, JointRows
from linattn.attention.backends.blocked.records import Saved
from linattn.attention.backends.blocked.rows import rows_of, saved_rows, times_z
from linattn.attention.sums import Sums
from linattn.feature_maps._powers import Powers


class BoundedSegment(NamedTuple):
    """A segment's tokens relative to one exponent per head."""

    keys: BoundedKeys
    query: Tensor  # (B, H, G, n, D)
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
        keys = bounded_keys(self.powers, self.keys, tokens, m)
        query = self.space.rows("q", self.fold.query[..., tokens, :])
        term = self.powers.term(query)
        fits = keys.fits & fits_rows(self.powers, term) & are_moderate(S, z) & self.is_hopeful
        return BoundedSegment(keys, query, term.add_(keys.c[..., None, None]), fits)

    def advance(self, blocks: list[slice], found: BoundedSegment, state: Running, rows: Rows) -> Tensor:
        """Fold a segment in and store its rows; the heads (B, H) where that holds."""
        is_empty = (state.views().z == 0).all(-1)
        state.rescale(found.keys.c.unsqueeze(-1).expand(state.m.shape))
        out, den, reference = rows_of(rows, whole(blocks))
        reference.copy_(found.reference)
        of_blocks = (parts(found.query, blocks, 3), parts(out, blocks, 3), parts(den, blocks, 3))
        for keys, query, of_out, of_den in zip(found.keys.blocks(blocks), *of_blocks, strict=True):
            phi_k = write_powers(self.powers, keys.tokens, "keys", self.space)
            phi_q = write_powers(self.powers, query, "queries", self.space)
            weights = self.fold.hide_later_(self.space.product("weights", phi_q, phi_k.mT))
            weighted, u = keys.weighted_values(self.space), keys.weight.flatten(0, 1)
            num = self.space.product("num", weights, weighted).baddbmm_(phi_q, state.S)
            total = self.space.product("den", u.unsqueeze(-2), weights.mT).baddbmm_(state.z.unsqueeze(-2), phi_q.mT)
            store_bounded(of_out, of_den, num, total)
            state.fold_in_weighted(phi_k, u, weighted)
        holds = fits_denominators(den)
        if not bool(holds.all()):
            # Rows that see no key at all are 0, not 0/0.
            out.masked_fill_((den == 0).unsqueeze(-1), 0)
            holds = fits_denominators(den.masked_fill(self._blind(blocks, is_empty), 1))
        return holds & fits_sums(*state.views()[:2])

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
        keys = bounded_keys(self.powers, self.keys, whole(blocks), before.m)
        state.rescale(keys.c.unsqueeze(-1).expand(before.m.shape))
        of_blocks, entries = keys.blocks(blocks), []
        for slot, block in enumerate(of_blocks):
            held = (self.space.buffer(f"{slot} {i}", *x.shape).copy_(x) for i, x in enumerate((state.S, state.z)))
            phi_k = write_powers(self.powers, block.tokens, f"{slot} keys", self.space)
            entries.append((*held, phi_k))
            if slot + 1 < len(blocks):
                state.fold_in_weighted(phi_k, block.weight.flatten(0, 1), block.weighted_values(self.space))
        for part, block, entry in reversed(list(zip(blocks, of_blocks, entries, strict=True))):
            self._pull_block(part, block, entry, (S.flatten(0, 1), z.flatten(0, 1)), tokens)
        decay = (before.m - keys.c.unsqueeze(-1)).exp_()
        S.mul_(decay.unsqueeze(-1))
        z.mul_(decay)

    def _pull_block(
        self,
        block: slice,
        keys: KeyBlock,
        entry: tuple[Tensor, Tensor, Tensor],
        of_sums: tuple[Tensor, Tensor],
        tokens: TokenGradients,
    ) -> None:
        """Add to the gradients of the sums, and store those of a block's tokens."""
        (S, z, phi_k), (grad_S, grad_z), space, u = entry, of_sums, self.space, keys.weight.flatten(0, 1)
        masked, x_k, x_q = self.keys.masked(block), keys.tokens, query_rows(self.fold.query, block, space)
        phi_q, weighted = write_powers(self.powers, x_q, "queries", space), keys.weighted_values(space)
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
        add_product_(grad_S, phi_q, grad_num)
        grad_z.unsqueeze(-2).baddbmm_(grad_den.mT, phi_q)
        # out does not change with a factor common to all features of a row, den does.
        tokens.store_query(block, self.powers.vjp(x_q, grad_q, (rows.grad_den * rows.den).unsqueeze(-1)))
        total = grad_k.sum(-1, keepdim=True)
        tokens.store_key(block, masked, self.powers.vjp(x_k, grad_k, total))
        tokens.store_value(block, masked, grad_v.view(*x_k.shape[:-1], -1))
        self.fold.of_bias.store(block, masked, total.squeeze(-1))
