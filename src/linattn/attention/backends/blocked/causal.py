"""The causal fold: each block reads the sums before it and its own past, then is folded in.

Plain maps share one reference c among a block's rows, the running maximum after the block. A much larger later key
would underflow earlier rows, so heads whose maximum jumps within a block take the sums of jumps.py there. Grouped maps
have rows of their own (grouped_causal.py).

It is pulled back block by block from the last to the first, features recomputed, no state unwound: the forward pass
keeps the sums before every segment of blocks; a segment's own sums, and its keys' features, are computed once more when
the sweep reaches it, so that memory does not grow with its number. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Running, Workspace, blocks, by_columns, causal_mask, num_blocks
from linattn.attention.backends.blocked.bounded import FLOOR, bounded_powers, by_head, stretches, whole
from linattn.attention.backends.blocked.bounded_causal import BoundedGradients, BoundedRows
from linattn.attention.backends.blocked.features import (
    BiasGradient,
    KeyBlocks,
    Keys,
    MapGradients,
    normalised_query_features,
    query_block,
    query_features,
    query_gradient,
    query_rows,
)
from linattn.attention.backends.blocked.grouped_causal import BlockState, GroupedGradients, GroupedRows, TokenGradients
from linattn.attention.backends.blocked.jumps import split, split_gradients, split_rows
from linattn.attention.backends.blocked.records import (
    Causal,
    CausalOutputs,
    Gradients,
    KeyGradients,
    Saved,
    empty_sums,
    sums_of,
)
from linattn.attention.backends.blocked.rows import SavedRows, empty_rows, rows_of, saved_rows, store_rows, times_z
from linattn.attention.sums import Sums, lowest
from linattn.feature_maps import FeatureMap, GroupedFeatureMap

# A denominator may shrink to exp(-60), far above float32's smallest normal number, exp(-87): by so much, and by what z
# of bounded keys lies below 1.
_MAX_JUMP = 60.0 - FLOOR

# The sums are kept every so many blocks for the backward pass, which then folds each block in once more, not twice.
SEGMENT = 16


def forward(feature_map: FeatureMap, inputs: Causal, span: int = 0) -> CausalOutputs:
    """Rows; with `span`, of the keys of earlier spans of so many tokens only."""
    fold: JointRows | GroupedRows
    if isinstance(feature_map, GroupedFeatureMap):
        fold = GroupedRows(feature_map, inputs, span)
    else:
        fold = JointRows(feature_map, inputs, span)
    powers = bounded_powers(feature_map, inputs.query, inputs.S)
    bounded = BoundedRows(powers, fold) if powers is not None and isinstance(fold, JointRows) else None
    state, rows, kept = Running(sums_of(inputs)), empty_rows(inputs.query, inputs.S), empty_checkpoints(inputs, span)
    is_bounded = no_bounds(inputs, span)
    for index, segment in enumerate(segments(inputs, span)):
        if index:
            for target, now in zip(kept, state.views(), strict=True):
                target[:, index - 1] = now
        general = partial(_advance, fold, segment, state, rows)
        if bounded is None:
            general()
            continue
        found, sums = bounded.segment(segment, state), state.own()
        advance = partial(bounded.advance, segment, found, state, rows)
        is_bounded[:, index] = by_head(found.fits, advance, general, sums, rows_of(rows, whole(segment)))
        bounded.is_hopeful &= ~found.fits | is_bounded[:, index]
    return CausalOutputs(*rows, *state.sums(), *kept, is_bounded)


def _advance(fold: JointRows | GroupedRows, segment: list[slice], state: Running, rows: Rows) -> None:
    """Fold a segment in and store its rows, whatever its tokens."""
    for block in segment:
        store_rows(rows, block, *fold.advance(block, state))


def backward(feature_map: FeatureMap, saved: Saved, span: int = 0) -> Gradients:
    """Gradients of (query, key, value, S, z)."""
    inputs: Causal = saved.inputs
    outputs: CausalOutputs = saved.outputs
    fold: JointGradients | GroupedGradients
    if isinstance(feature_map, GroupedFeatureMap):
        fold = GroupedGradients(feature_map, saved, span)
    else:
        fold = JointGradients(feature_map, saved, span)
    powers = bounded_powers(feature_map, inputs.query, inputs.S)
    bounded = BoundedGradients(powers, fold, saved) if powers is not None and isinstance(fold, JointGradients) else None
    tokens = TokenGradients(*(x.new_empty(x.shape) for x in (inputs.query, inputs.key, inputs.value)))
    S, z = by_columns(saved.grads.S), saved.grads.z.clone(memory_format=torch.contiguous_format)
    for index, segment in reversed(list(enumerate(segments(inputs, span)))):
        before = outputs.kept(index) if index else sums_of(inputs)
        general = partial(_pull, fold, segment, before, S, z, tokens)
        if bounded is None:
            general()
            continue
        pull, fits = partial(bounded.pull, segment, before, S, z, tokens), outputs.is_bounded[:, index]
        by_head(fits, pull, general, (S, z), [*tokens.of(whole(segment)), *fold.of_bias.of(whole(segment))])
    return Gradients((*tokens, S.contiguous(), z), fold.of_bias.total, fold.back.finish())


def _pull(
    fold: JointGradients | GroupedGradients,
    segment: list[slice],
    before: Sums,
    S: Tensor,
    z: Tensor,
    tokens: TokenGradients,
) -> None:
    """Write the gradients of the sums before a segment over those after it; its tokens' are stored."""
    for visit in reversed(_segment_states(fold, segment, before)):
        found = fold.pull(visit, S, z, tokens)
        for target, x in zip((S, z), found, strict=True):
            if x is not target:
                target.copy_(x)


def _segment_states(fold: JointGradients | GroupedGradients, segment: list[slice], before: Sums) -> list[BlockState]:
    """The blocks of a segment, each with the sums before it."""
    found, state = [], Running(before)
    for slot, block in enumerate(segment):
        entry = Sums(*(fold.space.buffer(f"{slot} {i}", *x.shape).copy_(x) for i, x in enumerate(state.views())))
        x, v = fold.keys.tokens(block, f"{slot} "), fold.keys.values(block)
        keys = fold.keys.features(block, x, f"{slot} " if fold.keeps_features else "")
        c = keys.peak(entry.m)
        safe = fold.safe_heads(keys, block, entry.m, c)
        phi_k = keys.turned_relative_to(c)
        found.append(BlockState(block, entry, c, x, keys, phi_k, safe))
        if slot + 1 < len(segment):
            state.rescale(c)
            state.fold_in(phi_k, v)
    return found


def segments(inputs: Causal, span: int) -> list[list[slice]]:
    """The blocks of the forward and the backward pass, in segments."""
    return stretches(blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span), SEGMENT)


def empty_outputs(inputs: Causal, span: int) -> CausalOutputs:
    """Memory for all outputs."""
    rows, kept = empty_rows(inputs.query, inputs.S), empty_checkpoints(inputs, span)
    return CausalOutputs(*rows, *empty_sums(inputs), *kept, no_bounds(inputs, span))


def empty_checkpoints(inputs: Causal, span: int) -> Sums:
    """Memory for the sums before every segment but the first, which are given: (B, K, H, …)."""
    num_kept = max(num_blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span) - 1, 0) // SEGMENT
    return Sums(*(x.new_empty(x.shape[0], num_kept, *x.shape[1:]) for x in sums_of(inputs)))


def no_bounds(inputs: Causal, span: int) -> Tensor:
    """(B, K + 1, H) bool: no segment of any head has bounded features."""
    num_segments = -(-num_blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span) // SEGMENT)
    return inputs.S.new_zeros(inputs.S.shape[0], num_segments, inputs.S.shape[1], dtype=torch.bool)


class JointRows:
    """A block's rows for plain maps, all relative to one exponent."""

    def __init__(self, feature_map: FeatureMap, inputs: Causal, span: int) -> None:
        self.map, self.query, self.span, self.space = feature_map, inputs.query, span, Workspace(inputs.S)
        self.keys, self.groups = KeyBlocks(feature_map, inputs, self.space), inputs.query.shape[2]

    def advance(self, block: slice, state: Running) -> tuple[Tensor, Tensor, Tensor]:
        """Num (B·H, G·n, Dv), den (B·H, G·n, 1) and its exponent (B, H, G·n); the block is folded in."""
        space, exponential = self.space, self.map.exponential
        keys, values, apart = self.keys.features(block), self.keys.values(block), None
        t = query_block(self.map, query_rows(self.query, block, space), space)
        c = keys.peak(state.m)
        safe = self.safe_heads(keys, block, state.m, c)
        # First, since rescaling and the features write over the sums, queries and keys that the split rows need.
        if safe is not None:
            cut = split(t, keys, values, self.groups, self.span, exponential)
            apart = split_rows(cut, values.shape[2], state.views())
        state.rescale(c)
        phi_q, reference = query_features(t, c, exponential, over=True)
        phi_k = keys.turned_relative_to(c)
        # (φ(q)φ(k)ᵀ)v + φ(q)S: the block's own past first, n × n weights; then what came before it.
        flat_q = phi_q.flatten(0, 1)
        weights = self.hide_later_(space.product("weights", flat_q, phi_k.flatten(0, 1).mT))
        num = space.product("num", weights, values.flatten(0, 1)).baddbmm_(flat_q, state.S)
        den = weights.sum(-1, keepdim=True).add_(times_z(flat_q, state.z))
        state.fold_in(phi_k, values)
        if safe is None or apart is None:
            return num, den, reference
        keep = safe.flatten()[:, None, None]
        num, den = (torch.where(keep, x, y.flatten(0, 1)) for x, y in zip((num, den), apart[:2], strict=True))
        return num, den, torch.where(safe[..., None], reference, apart[2])

    def safe_heads(self, keys: Keys, block: slice, m: Tensor, c: Tensor) -> Tensor | None:
        """(B, H): where c exceeds, in no feature, by the allowed jump what the first row with a key sees; None for
        everywhere.

        Each head decides for itself, so that its rounding does not depend on its neighbours.
        """
        if keys.log is None:
            return None
        first, masked = keys.log[..., 0, :], self.keys.masked(block)
        if self.span:
            first = m  # the first span sees no key of its own block
        elif masked is not None:
            index = (~masked).to(torch.uint8).argmax(-1)[..., None, None]
            first = torch.take_along_dim(keys.log, index, dim=-2).squeeze(-2)
            # Rows before it see the state alone, where that holds any key.
            first = torch.where(masked[..., :1] & (m > lowest(m.dtype)), m, first)
        safe = (c - torch.maximum(m, first)).amax(-1) < _MAX_JUMP
        return None if bool(safe.all()) else safe

    def hide_later_(self, scores: Tensor) -> Tensor:
        """Scores (B·H, G·n, n) with those of unseen keys set to 0, in place."""
        rows = scores.unflatten(1, (self.groups, -1))
        if self.span:
            rows.masked_fill_(~causal_mask(scores.shape[-1], self.span, scores.device), 0)
        else:
            rows.tril_()
        return scores


class Pulled(NamedTuple):
    """Gradients of what the map returned for a block's queries and keys, of its values and of the sums before it."""

    t: Tensor
    keys: KeyGradients
    value: Tensor  # (B, H, n, Dv)
    S: Tensor
    z: Tensor

    def where(self, safe: Tensor, apart: Pulled) -> Pulled:
        """These in heads (B, H) that are safe, the others elsewhere."""

        def choose(x: Tensor, y: Tensor) -> Tensor:
            return torch.where(safe[..., None, None] if x.ndim == 4 else safe[..., None], x, y)

        keys = self.keys.join(apart.keys, choose)
        value, S, z = choose(self.value, apart.value), choose(self.S, apart.S), choose(self.z, apart.z)
        return Pulled(choose(self.t, apart.t), keys, value, S, z)


class JointGradients(JointRows):
    """The gradients of blocks whose rows share one exponent."""

    keeps_features = True

    def __init__(self, feature_map: FeatureMap, saved: Saved, span: int) -> None:
        super().__init__(feature_map, saved.inputs, span)
        self.back, self._saved = MapGradients(feature_map, saved.tensors, at_once=SEGMENT), saved
        self.of_bias = BiasGradient(saved.inputs.bias, saved.inputs.key.shape[1], wanted=saved.bias_grad)

    def pull(self, visit: BlockState, grad_S: Tensor, grad_z: Tensor, tokens: TokenGradients) -> tuple[Tensor, Tensor]:
        """Those of S and z before a block, from those after it, which may be written over; its tokens' are stored."""
        x_q, value = query_rows(self.query, visit.block, self.space), self.keys.values(visit.block)
        rows = saved_rows(self._saved, visit.block, query_block(self.map, x_q, self.space), self.space)
        if visit.safe is None:
            found = self._pull_joint(visit, rows, value, grad_S, grad_z)
        else:
            # The split goes first, and the joint part gets copies, since that writes over t, grad S and grad z.
            apart = self._pull_split(visit, rows, value, grad_S, grad_z)
            found = self._pull_joint(visit, rows, value, grad_S.clone(), grad_z.clone()).where(visit.safe, apart)
        block, masked = visit.block, self.keys.masked(visit.block)
        self.of_bias.store(block, masked, found.keys.log)
        self.back.query(x_q, found.t, partial(tokens.store_query, block))
        self.back.key(visit.x, found.keys, partial(tokens.store_key, block, masked))
        tokens.store_value(block, masked, found.value)
        return found.S, found.z

    def _pull_joint(self, visit: BlockState, rows: SavedRows, value: Tensor, grad_S: Tensor, grad_z: Tensor) -> Pulled:
        """A safe block reads the sums and its own keys relative to the same exponent."""
        c, space, exponential = visit.c, self.space, self.map.exponential
        decay = (visit.before.m - c).exp_()
        S = torch.mul(visit.before.S, decay.unsqueeze(-1), out=space.buffer("S", *visit.before.S.shape)).flatten(0, 1)
        z = (visit.before.z * decay).flatten(0, 1)
        shaped_q = normalised_query_features(rows.t, c, rows.reference, exponential, over=visit.safe is None)
        phi_q, phi_k, v = shaped_q.flatten(0, 1), visit.phi_k.flatten(0, 1), value.flatten(0, 1)
        weights = self.hide_later_(space.product("weights", phi_q, phi_k.mT))
        grad_num, grad_den = rows.gradients(
            lambda: (weights @ v + phi_q @ S, weights.sum(-1, keepdim=True) + times_z(phi_q, z)), space
        )
        # Of scores φ(q)φ(k)ᵀ: [grad num, grad den] [v, 1]ᵀ where a row sees the key, (B·H, G·n, n).
        grad_scores = self.hide_later_(space.product("grad_scores", grad_num, v.mT).add_(grad_den))
        # Rows read [S, z] and the block's own keys.
        grad_phi_q = space.product("grad_q", grad_num, S.mT).addcmul_(grad_den, z.unsqueeze(-2))
        grad_phi_q.baddbmm_(grad_scores, phi_k)
        # Keys are read by the sums after the block, whose gradient is given, and by its own rows.
        flat_grad_S = grad_S.flatten(0, 1)
        grad_phi_k = space.product("grad_k", v, flat_grad_S.mT).add_(grad_z.flatten(0, 1).unsqueeze(-2))
        grad_phi_k.baddbmm_(grad_scores.mT, phi_q)
        grad_v = space.product("grad_v", phi_k, flat_grad_S).baddbmm_(weights.mT, grad_num)
        # Last, since the products above need the gradient of the sums after the block.
        flat_grad_S.baddbmm_(phi_q.mT, grad_num)
        grad_z.add_(torch.bmm(grad_den.mT, phi_q).view(grad_z.shape))
        return Pulled(
            query_gradient(grad_phi_q.view(shaped_q.shape), shaped_q, c, rows.reference, exponential),
            visit.keys.gradients(c, visit.phi_k, grad_phi_k.view(visit.phi_k.shape)),
            grad_v.view(value.shape),
            grad_S.mul_(decay.unsqueeze(-1)),
            grad_z.mul_(decay),
        )

    def _pull_split(self, visit: BlockState, rows: SavedRows, value: Tensor, grad_S: Tensor, grad_z: Tensor) -> Pulled:
        """A block whose maximum jumps: the sums at their own exponent, and its own past cut into rectangles."""
        (S, z, m), c, exponential = visit.before, visit.c, self.map.exponential
        phi_q = normalised_query_features(rows.t, m, rows.reference, exponential)
        # The segment's pass wrote the features over the exponents, which are wanted here.
        keys = self.keys.features(visit.block, visit.x, "split ")
        cut = split(rows.t, keys, value, self.groups, self.span, exponential)
        length = value.shape[2]
        flat_num, flat_den = rows.gradients(lambda: split_rows(cut, length, visit.before)[:2], self.space)
        grad_num, grad_den = (x.view(*value.shape[:2], *x.shape[1:]) for x in (flat_num, flat_den))
        inner = split_gradients(cut, length, grad_num, grad_den, rows.reference)
        grad_phi_q = grad_num @ S.mT + grad_den * z.unsqueeze(-2)
        grad_t = query_gradient(grad_phi_q, phi_q, m, rows.reference, exponential)
        grad_phi_k = value @ grad_S.mT + grad_z.unsqueeze(-2)
        decay = (m - c).exp_()
        of_state = keys.gradients(c, visit.phi_k, grad_phi_k)
        return Pulled(
            grad_t + inner.t,
            of_state.join(inner.keys, torch.add),
            visit.phi_k @ grad_S + inner.value,
            grad_S * decay.unsqueeze(-1) + phi_q.mT @ grad_num,
            grad_z * decay + (phi_q * grad_den).sum(-2),
        )
