"""The causal fold: each block reads the sums before it and its own past, then is folded in.

What a block of a grouped map does is of grouped.py. A plain map's rows share one reference c, the running maximum after
the block, beside biases apart (biases.py). A much larger later key would underflow earlier rows, so heads whose maximum
jumps within a block take the sums of jumps.py there, their biases within their exponents.

It is pulled back block by block from the last to the first, features recomputed, no state unwound: the forward pass
keeps the sums before every segment of blocks; a segment's own sums, and its keys' features, are computed once more when
the sweep reaches it, so that memory does not grow with its number. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked import features, records
from linattn.attention.backends.blocked.biases import Biases, Ways, last_level, ways
from linattn.attention.backends.blocked.blocks import (
    Running,
    Workspace,
    add_product_,
    blocks,
    by_columns,
    exponential_,
    num_blocks,
)
from linattn.attention.backends.blocked.grouped import BlockState, GroupedGradients, GroupedRows, Loaded, TokenGradients
from linattn.attention.backends.blocked.jumps import Split, safe_heads, split, split_gradients, split_rows
from linattn.attention.backends.blocked.records import Causal, CausalOutputs, Gradients, KeyGradients, Saved, SavedRows
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.feature_maps.map_gradients import MapGradients

# The sums are kept every so many blocks for the backward pass, which then folds each block in once more, not twice.
SEGMENT = 16
# A denominator may shrink to exp(-32), far above what features are 0 below, exp(-61) in float32.
_MAX_JUMP = 32.0


class JointRows:
    """A block's rows for plain maps, all relative to one exponent."""

    def __init__(self, feature_map: FeatureMap, inputs: Causal, span: int) -> None:
        self.map, self.query, self.span, self.space = feature_map, inputs.query, span, Workspace(inputs.S)
        self.keys, self.groups = features.KeyBlocks(feature_map, inputs, self.space), inputs.query.shape[2]

    def advance(self, block: slice, state: Running, loaded: Loaded) -> tuple[Tensor, Tensor, Tensor | None]:
        """Num (B·H, G·n, Dv), den (B·H, G·n, 1) and its exponent (B, H, G·n), None for 0; the block is folded in."""
        space, (keys, c, safe, biases, _) = self.space, loaded
        x, values, apart = features.query_rows(self.query, block, space), self.keys.values(block), None
        if self.sees_sums_alone(block):
            rows = features.read_queries(self.map, x, self.keys.base(state.m), space, partial(self._sums, state))
            state.rescale(c)
            self.fold_in(state, loaded, keys.turned_relative_to(c), values)
            return rows if biases is None else biases.beside(*rows)
        # First, since rescaling and the features write over the sums, queries and keys that the split rows need.
        if safe is not None:
            cut = self.cut(safe, x, keys, values, state.m)
            apart = split_rows(cut, values.shape[2], state.views()._replace(m=state.m))
        state.rescale(c)
        phi_k = keys.turned_relative_to(c)
        if safe is None or apart is None or bool(safe.any()):
            sums = partial(self._sums, state, past=(phi_k.flatten(0, 1), values.flatten(0, 1)), biases=biases)
            num, den, reference = features.read_queries(self.map, x, self.keys.base(c), space, sums)
            if safe is not None and apart is not None:
                reference = den.new_zeros(*safe.shape, den.shape[1]) if reference is None else reference.clone()
                for x, part in zip((num, den, reference.flatten(0, 1)), apart, strict=True):
                    x[cut.heads] = part.squeeze(0)
        else:
            num, den, reference = apart[0].squeeze(0), apart[1].squeeze(0), apart[2].view(*safe.shape, -1)
        self.fold_in(state, loaded, phi_k, values)
        return (num, den, reference) if biases is None else biases.beside(num, den, reference)

    def load(self, block: slice, state: Running, x: Tensor | None = None, slot: str = "") -> Loaded:
        """A block's keys, with biases apart in all heads that allow it; the sums are made ready for them."""
        if not self.map.exponential:
            keys, bias = self.keys.linear_features(block, x, slot)
            if bias is None:
                return Loaded(keys, keys.peak(state.m))
            state.raise_level()
            how = ways(bias, state, state.m, self.span, None, _MAX_JUMP)
            return self._apart(Loaded(keys, state.m), bias, state, how)
        if (bias := self.keys.bias(block)) is None or not self.keys.has_biases:
            keys = self.keys.features(block, state.m, x, slot)
            c = keys.peak(state.m)
            return Loaded(keys, c, safe_heads(keys, self.keys.masked(block), self.span, state.m, c, _MAX_JUMP))
        state.raise_level()
        keys = self.keys.features(block, state.m, x, slot, torch.zeros_like(bias))
        c = keys.peak(state.m)
        how = ways(bias, state, c, self.span, partial(keys.least, c), _MAX_JUMP)
        if bool(how.apart.all()):
            return self._apart(Loaded(keys, c), bias, state, how)
        apart = how.apart.unsqueeze(-1)
        state.relabel(last_level(bias, state.level), ~how.apart)
        within = (bias - state.level).masked_fill_(apart, 0)
        keys = self.keys.features(block, state.m, x, slot, within)
        c = keys.peak(state.m)
        safe = safe_heads(keys, self.keys.masked(block), self.span, state.m, c, _MAX_JUMP)
        loaded = Loaded(keys, c, safe if safe is None else safe | how.apart, within=within)
        return self._apart(loaded, torch.where(apart, bias, state.level), state, how)

    def _apart(self, loaded: Loaded, bias: Tensor, state: Running, how: Ways) -> Loaded:
        """Keys beside these biases; in joint heads the sums go to the block's last level first."""
        if bool(how.joint.any()):
            state.fade(torch.where(how.joint.unsqueeze(-1), last_level(bias, state.level), state.level))
        return loaded._replace(biases=Biases.of(bias, state.level, self.span, how.joint))

    def fold_in(self, state: Running, loaded: Loaded, phi_k: Tensor, values: Tensor) -> None:
        """Fold a block in."""
        if loaded.biases is None:
            state.fold_in(phi_k, values, loaded.keys.total)
            return
        after = loaded.biases.after
        if loaded.biases.fading is not None:
            state.fade(loaded.biases.level)
        values = torch.mul(values, after.unsqueeze(-1), out=self.space.buffer("after", *values.shape))
        state.fold_in(phi_k, values, (after.unsqueeze(-2) @ phi_k).squeeze(-2))

    def _sums(
        self,
        state: Running,
        phi_q: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        biases: Biases | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Num and den of features over the sums, and over a block's own past of features and values."""
        if past is None:
            return self.space.product("num", phi_q, state.S), records.times_z(phi_q, state.z)
        # (φ(q)φ(k)ᵀ)v + φ(q)S: the block's own past first, n × n weights; then what came before it.
        weights, value = self.hide_later_(self.space.product("weights", phi_q, past[0].mT)), past[1]
        if biases is None:
            num, den = self.space.product("num", weights, value), weights.sum(-1, keepdim=True)
            return num.baddbmm_(phi_q, state.S), torch.baddbmm(den.mT, state.z.unsqueeze(-2), phi_q.mT).mT
        weights, of_past = biases.fade_(weights), self.space.product("past", phi_q, state.S)
        num = self.space.product("num", weights, biases.weigh(value)).add_(biases.of_past(of_past))
        den = records.times_z(weights, biases.keys.flatten(0, 1))
        return num, den + biases.of_past(records.times_z(phi_q, state.z))

    def cut(self, safe: Tensor, x: Tensor, keys: features.Keys, values: Tensor, m: Tensor) -> Split:
        """Other heads, ready for rows each on a scale of its own; the queries' buffer is written over."""
        t = features.query_block(self.map, x, self.space, -self.keys.base(m).start)
        return split((~safe).flatten().nonzero().squeeze(-1), t, keys, values, self.groups, self.span)

    def sees_sums_alone(self, block: slice) -> bool:
        """Whether a block lies in one span, so that its rows see none of its own keys."""
        return bool(block.stop - block.start <= self.span)

    def hide_later_(self, scores: Tensor) -> Tensor:
        """Scores (B·H, G·n, n) with those of unseen keys set to 0, in place."""
        rows = scores if self.groups == 1 else scores.unflatten(1, (self.groups, -1))
        rows.tril_()
        if span := self.span:
            whole = scores.shape[-1] // span * span
            rows[..., whole:, whole:].zero_()
            rows[..., :whole, :whole].unflatten(-1, (-1, span)).unflatten(-3, (-1, span)).diagonal(0, -4, -2).zero_()
        return scores


class Pulled(NamedTuple):
    """Gradients of what the map returned for a block's queries and keys, of its values and of the sums before it."""

    t: Tensor
    keys: KeyGradients
    value: Tensor  # (B, H, n, Dv)
    S: Tensor
    z: Tensor

    def where(self, safe: Tensor, apart: Pulled) -> Pulled:
        """Select these in heads (B, H) that are safe, the others elsewhere."""

        def choose(x: Tensor, y: Tensor) -> Tensor:
            return torch.where(safe[..., None, None] if x.ndim == 4 else safe[..., None], x, y)

        keys = KeyGradients(choose(self.keys.features, apart.keys.features))
        value, S, z = choose(self.value, apart.value), choose(self.S, apart.S), choose(self.z, apart.z)
        return Pulled(choose(self.t, apart.t), keys, value, S, z)


class JointGradients(JointRows):
    """The gradients of blocks whose rows share one exponent."""

    keeps_features = True

    def __init__(self, feature_map: FeatureMap, saved: Saved, span: int) -> None:
        super().__init__(feature_map, saved.inputs, span)
        self.back, self._saved = MapGradients(feature_map, saved.tensors, at_once=SEGMENT), saved
        self.of_bias = features.BiasGradient(saved.inputs.bias, saved.inputs.key.shape[1], wanted=saved.bias_grad)

    def pull(self, visit: BlockState, grad_S: Tensor, grad_z: Tensor, tokens: TokenGradients) -> tuple[Tensor, Tensor]:
        """Gradients of S and z before a block, from those after, which may be written over; its tokens' are stored."""
        x_q, value = features.query_rows(self.query, visit.block, self.space), self.keys.values(visit.block)
        rows, safe = records.saved_rows(self._saved, visit.block, x_q, self.space), visit.loaded.safe
        if visit.loaded.biases is not None:
            rows = rows._replace(reference=visit.loaded.biases.references(rows.reference, -1))
        if self.sees_sums_alone(visit.block):
            pulled = self._pull_apart(visit, rows, value, grad_S, grad_z, None)
        elif safe is None:
            pulled = self._pull_joint(visit, rows, value, grad_S, grad_z)
        else:
            # The segment's pass wrote the features over the exponents, which are wanted here.
            m, within = visit.before.m, visit.loaded.within
            cut = self.cut(safe, x_q, self.keys.features(visit.block, m, visit.x, "split ", within), value, m)
            # Each part writes over grad S and grad z.
            apart = self._pull_apart(visit, rows, value, grad_S.clone(), grad_z.clone(), cut)
            joint = self._pull_joint(visit, rows, value, grad_S, grad_z) if bool(safe.any()) else apart
            pulled = joint.where(safe, apart)
        block, masked = visit.block, self.keys.masked(visit.block)
        self.of_bias.store(block, masked, pulled.keys.log)
        self.back.query(x_q, pulled.t, partial(features.store, tokens.query[..., block, :], None))
        self.back.key(visit.x, pulled.keys, partial(features.store, tokens.key[:, :, block], masked))
        features.store(tokens.value[:, :, block], masked, pulled.value)
        if visit.factor is not None:
            pulled.S.mul_(visit.factor.unsqueeze(-1))
            pulled.z.mul_(visit.factor)
        return pulled.S, pulled.z

    def _pull_joint(self, visit: BlockState, rows: SavedRows, value: Tensor, grad_S: Tensor, grad_z: Tensor) -> Pulled:
        """A safe block reads the sums and its own keys relative to the same exponent."""
        (_, c, _, biases, _), space, exponential = visit.loaded, self.space, self.map.exponential
        before, decay = visit.before, None if c is visit.before.m else (visit.before.m - c).exp_()
        if decay is not None:
            S = torch.mul(before.S, decay.unsqueeze(-1), out=space.buffer("S", *before.S.shape))
            before = Sums(S, before.z * decay, c)
        S, z = before.S.flatten(0, 1), before.z.flatten(0, 1)
        shaped_q = features.repeated_query_features(self.map, rows.x, self.keys.base(c), rows.reference, space)
        phi_q, phi_k, v = shaped_q.flatten(0, 1), visit.phi_k.flatten(0, 1), value.flatten(0, 1)
        weights = self.hide_later_(space.product("weights", phi_q, phi_k.mT))
        w, weight = v, v.new_ones(()).expand(*v.shape[:2], 1)
        if biases is not None:
            weights, w, weight = biases.fade_(weights), biases.weigh(v), biases.keys.flatten(0, 1).unsqueeze(-1)

        def sums() -> tuple[Tensor, Tensor]:
            parts = phi_q @ S, records.times_z(phi_q, z)
            num, den = parts if biases is None else [biases.of_past(x) for x in parts]
            return weights @ w + num, weights @ weight + den

        grad_num, grad_den = rows.gradients(sums, space)
        # Of scores φ(q)φ(k)ᵀ: [grad num, grad den] [v, 1]ᵀ where a row sees the key, (B·H, G·n, n).
        grad_scores = space.product("grad_scores", grad_num, w.mT)
        grad_scores = grad_scores.add_(grad_den) if biases is None else grad_scores.addcmul_(grad_den, weight.mT)
        grad_scores = self.hide_later_(grad_scores)
        grad_scores = grad_scores if biases is None else biases.fade_(grad_scores)
        # Keys are read by the sums after the block, whose gradient is given, and by its own rows.
        grad_phi_k, grad_v = self._pull_fold(visit, v, grad_S, grad_z)
        grad_phi_k.baddbmm_(grad_scores.mT, phi_q)
        if biases is None:
            grad_v.baddbmm_(weights.mT, grad_num)
        else:
            grad_v.addcmul_(weights.mT @ grad_num, weight)
            grad_num, grad_den = biases.of_past(grad_num), biases.of_past(grad_den)
        # Rows read [S, z] and the block's own keys.
        grad_phi_q = space.product("grad_q", grad_num, S.mT).addcmul_(grad_den, z.unsqueeze(-2))
        grad_phi_q.baddbmm_(grad_scores, phi_k)
        # Last, since the products above need the gradient of the sums after the block.
        add_product_(grad_S.flatten(0, 1), phi_q, grad_num)
        grad_z.add_(torch.bmm(grad_den.mT, phi_q).view(grad_z.shape))
        return Pulled(
            features.query_gradient(grad_phi_q.view(shaped_q.shape), shaped_q, c, rows.reference, exponential),
            self._of_keys(visit, grad_phi_k),
            grad_v.view(value.shape),
            grad_S if decay is None else grad_S.mul_(decay.unsqueeze(-1)),
            grad_z if decay is None else grad_z.mul_(decay),
        )

    def _pull_fold(self, visit: BlockState, v: Tensor, grad_S: Tensor, grad_z: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (B·H, n, R) and (B·H, n, Dv) of what was folded in; those of the sums fade as these did."""
        flat_S, flat_z, biases = grad_S.flatten(0, 1), grad_z.flatten(0, 1).unsqueeze(-2), visit.loaded.biases
        of_v = self.space.product("grad_v", visit.phi_k.flatten(0, 1), flat_S)
        if biases is None:
            return self.space.product("grad_k", v, flat_S.mT).add_(flat_z), of_v
        after = biases.after.flatten(0, 1).unsqueeze(-1)
        of_phi = self.space.product("grad_k", v * after, flat_S.mT).addcmul_(after, flat_z)
        if biases.fading is not None:
            grad_S.mul_(biases.fading.unsqueeze(-1))
            grad_z.mul_(biases.fading)
        return of_phi, of_v.mul_(after)

    def _of_keys(self, visit: BlockState, grad_phi_k: Tensor) -> KeyGradients:
        """The gradients of what the map returned for keys, and of biases apart from features."""
        grad_phi_k, (keys, c, _, biases, _) = grad_phi_k.view(visit.phi_k.shape), visit.loaded
        gradients = keys.gradients(c, visit.phi_k, grad_phi_k)
        if self.map.exponential or (biases is None and self.of_bias.of_heads is None):
            return gradients
        return gradients._replace(weight=(grad_phi_k * visit.phi_k).sum(-1))

    def _pull_apart(
        self, visit: BlockState, rows: SavedRows, value: Tensor, grad_S: Tensor, grad_z: Tensor, cut: Split | None
    ) -> Pulled:
        """Rows that read the sums at their own exponent, and where it jumps their block's own past, in rectangles."""
        (S, z, m), c, space, exponential = visit.before, visit.loaded.c, self.space, self.map.exponential
        flat_S, flat_z, length = S.flatten(0, 1), z.flatten(0, 1), value.shape[2]
        shaped_q = features.repeated_query_features(self.map, rows.x, self.keys.base(m), rows.reference, space)
        phi_q, v = shaped_q.flatten(0, 1), value.flatten(0, 1)

        def sums() -> tuple[Tensor, Tensor]:
            num, den = phi_q @ flat_S, records.times_z(phi_q, flat_z).contiguous()
            if cut is not None:
                num[cut.heads], den[cut.heads] = (x.squeeze(0) for x in split_rows(cut, length, visit.before)[:2])
            return num, den

        grad_num, grad_den = rows.gradients(sums, space)
        grad_phi_q = space.product("grad_q", grad_num, flat_S.mT).addcmul_(grad_den, flat_z.unsqueeze(-2))
        grad_phi_k, grad_v = self._pull_fold(visit, v, grad_S, grad_z)
        grad_v, decay = grad_v.view(value.shape), (m - c).exp_()
        grad_S.mul_(decay.unsqueeze(-1))
        add_product_(grad_S.flatten(0, 1), phi_q, grad_num)
        grad_z.mul_(decay).add_(torch.bmm(grad_den.mT, phi_q).view(grad_z.shape))
        grad_t = features.query_gradient(grad_phi_q.view(shaped_q.shape), shaped_q, m, rows.reference, exponential)
        of_keys = self._of_keys(visit, grad_phi_k)
        if cut is None:
            return Pulled(grad_t, of_keys, grad_v, grad_S, grad_z)
        inner_t, inner_keys, inner_v = split_gradients(cut, length, grad_num, grad_den, rows.reference)
        of_keys = KeyGradients(cut.add(of_keys.features, inner_keys))
        return Pulled(cut.add(grad_t, inner_t), of_keys, cut.add(grad_v, inner_v), grad_S, grad_z)


def forward(feature_map: FeatureMap, inputs: Causal, span: int = 0) -> CausalOutputs:
    """Rows, and what the backward pass needs; with `span`, of the keys of earlier spans of so many tokens only."""
    checkpoints = empty_checkpoints(inputs, span)
    rows, after = sweep(feature_map, inputs, span, checkpoints)
    return CausalOutputs(*rows, *after, *checkpoints)


def sweep(feature_map: FeatureMap, inputs: Causal, span: int, checkpoints: Sums | None = None) -> tuple[Rows, Sums]:
    """Rows, and the sums after them; `checkpoints` is where those before every segment but the first are written."""
    kind: Any = GroupedRows if isinstance(feature_map, GroupedFeatureMap) else JointRows
    fold: JointRows | GroupedRows = kind(feature_map, inputs, span)
    state, rows = Running(records.sums_of(inputs)), records.empty_rows(inputs.query, inputs.S)
    for index, block in enumerate(blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span)):
        if checkpoints is not None and index and index % SEGMENT == 0:
            for target, now in zip(checkpoints, state.views(), strict=True):
                target[:, index // SEGMENT - 1] = now
        records.store_rows(rows, block, *fold.advance(block, state, fold.load(block, state)))
    return rows, state.sums()


def backward(feature_map: FeatureMap, saved: Saved, span: int = 0) -> Gradients:
    """Gradients of (query, key, value, S, z)."""
    inputs: Causal = saved.inputs
    kind: Any = GroupedGradients if isinstance(feature_map, GroupedFeatureMap) else JointGradients
    fold: JointGradients | GroupedGradients = kind(feature_map, saved, span)
    tokens = TokenGradients(*(x.new_empty(x.shape) for x in (inputs.query, inputs.key, inputs.value)))
    S, z = by_columns(saved.grads.S), saved.grads.z.clone(memory_format=torch.contiguous_format)
    cut = blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span)
    for first in reversed(range(0, len(cut), SEGMENT)):
        before = saved.outputs.kept(first // SEGMENT) if first else records.sums_of(inputs)
        for visit in reversed(_segment_states(fold, cut[first : first + SEGMENT], before)):
            # Those of the sums before a block are written over those after it.
            for target, x in zip((S, z), fold.pull(visit, S, z, tokens), strict=True):
                if x is not target:
                    target.copy_(x)
    return Gradients((*tokens, S.contiguous(), z), fold.of_bias.total, fold.back.finish())


def _segment_states(fold: JointGradients | GroupedGradients, segment: list[slice], before: Sums) -> list[BlockState]:
    """The blocks of a segment, each with the sums before it."""
    visits, state = [], Running(before)
    for slot, block in enumerate(segment):
        x, v, m, level = fold.keys.tokens(block, f"{slot} "), fold.keys.values(block), state.m, state.level
        loaded = fold.load(block, state, x, f"{slot} " if fold.keeps_features else "")
        S, z = (fold.space.buffer(f"{slot} {i}", *y.shape).copy_(y) for i, y in enumerate(state.views()[:2]))
        factor = None if loaded.biases is None else exponential_((m - state.m + (level - state.level)).clamp_(max=0))
        m, phi_k = state.m, loaded.keys.turned_relative_to(loaded.c)
        visits.append(BlockState(block, Sums(S, z, m), x, loaded, phi_k, factor))
        if slot + 1 < len(segment):
            state.rescale(loaded.c)
            fold.fold_in(state, loaded, phi_k, v)
    return visits


def empty_outputs(inputs: Causal, span: int) -> CausalOutputs:
    """Memory for all outputs."""
    rows, checkpoints = records.empty_rows(inputs.query, inputs.S), empty_checkpoints(inputs, span)
    return CausalOutputs(*rows, *records.empty_sums(inputs), *checkpoints)


def empty_checkpoints(inputs: Causal, span: int) -> Sums:
    """Memory for the sums before every segment but the first, which are given: (B, K, H, …)."""
    num_kept = max(num_blocks(inputs.query, inputs.S.shape[2], is_causal=True, span=span) - 1, 0) // SEGMENT
    return Sums(*(x.new_empty(x.shape[0], num_kept, *x.shape[1:]) for x in records.sums_of(inputs)))
