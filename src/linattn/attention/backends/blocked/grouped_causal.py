"""The causal fold of grouped maps: a query's features depend on the sums z over the very keys it sees.

Per block: the weights of its own keys under each query's own group, each row on a scale of its own, so that no later
key can underflow it; their sums z beside those of the state; the query features; then both parts of the output. Letters
as in blocked/__init__.py; C groups, F = R/C features of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.absorption import store_masked
from linattn.attention.backends.blocked.blocks import Running, Workspace, block_size, blocks, columns
from linattn.attention.backends.blocked.causal import SEGMENT, causal_mask, num_checkpoints
from linattn.attention.backends.blocked.features import BiasGradient, Gradients, key_block, pulled
from linattn.attention.backends.blocked.grouped_reading import flat_groups, tiles
from linattn.attention.sums import Sums, accumulation_dtype, lowest, per_feature
from linattn.feature_maps import GroupedFeatureMap


class Block(NamedTuple):
    """A block's tokens, in the accumulation dtype."""

    query: Tensor  # (B, H, G·n, D)
    key: Tensor  # (B, H, n, D), masked ones 0
    value: Tensor  # (B, H, n, Dv), masked ones 0


def rows(
    feature_map: GroupedFeatureMap, block: Block, bias: Tensor | None, span: int, before: Sums
) -> tuple[Tensor, ...]:
    """Num (B, H, G·n, Dv), den and its exponent (B, H, G·n) of a block's queries, differentiable by autograd."""
    S, z, m = before
    group = feature_map.group(block.query)
    flat = flat_groups(feature_map, S, z, m)
    # Which of the groups of all heads, (B·H·N,): whole rows are picked, several times as fast as single numbers.
    which = torch.arange(m.shape[0] * m.shape[1], device=m.device).view(*m.shape[:2], 1) * feature_map.num_groups
    which = (group + which).flatten()
    psi, log = feature_map.key(block.key), feature_map.key_log_weight(block.key)
    length = block.key.shape[-2]
    exponents = log.mT.reshape(m.numel(), length).index_select(0, which).view(*group.shape, length)
    if bias is not None:
        exponents = exponents + bias.unsqueeze(-2)
    visible = causal_mask(length, span, m.device).repeat(group.shape[-1] // length, 1)
    exponents = torch.where(visible, exponents, -torch.inf)
    from_state = flat.m.index_select(0, which).view(group.shape)
    reference = torch.maximum(exponents.detach().amax(-1), from_state).clamp(min=lowest(S.dtype))
    weights = torch.exp(exponents - reference.unsqueeze(-1))
    decay = torch.exp(from_state - reference).unsqueeze(-1)
    own_z = flat.z.squeeze(1).index_select(0, which).unflatten(0, group.shape)
    own_z = torch.matmul(weights, psi) + decay * own_z
    place = flat.places.squeeze(1).index_select(0, which).unflatten(0, group.shape)
    phi_q, log_weight = feature_map.local_query(block.query, place, own_z)
    num = torch.matmul(weights * torch.matmul(phi_q, psi.mT), block.value)
    num = num + decay * read_groups(phi_q, group, flat.S, feature_map.num_groups)
    den = feature_map.normalizer(phi_q, own_z)
    return num, den, reference + log_weight


def read_groups(phi_q: Tensor, group: Tensor, S: Tensor, num_groups: int) -> Tensor:
    """φ(q)ᵀS of each query's own group: (B, H, N, F), (B, H, N), (B·H·C, F, Dv) -> (B, H, N, Dv)."""
    cut = tiles(group, num_groups)
    found = torch.bmm(cut.pick(phi_q.flatten(0, 2)), S.index_select(0, cut.group))
    out = found.new_empty(group.numel() + 1, S.shape[-1])
    return out.index_copy(0, cut.target, found.flatten(0, 1))[:-1].view(*group.shape, S.shape[-1])


def after(feature_map: GroupedFeatureMap, block: Block, bias: Tensor | None, before: Sums) -> tuple[Tensor, Tensor]:
    """S and z after a block, relative to the maximum of their exponents then; differentiable by autograd."""
    S, z, m = before
    psi, log = feature_map.key(block.key), feature_map.key_log_weight(block.key)
    if bias is not None:
        log = log + bias.unsqueeze(-1)
    c = torch.maximum(m, log.detach().amax(-2))
    phi_k = (torch.exp(log - c.unsqueeze(-2)).unsqueeze(-1) * psi.unsqueeze(-2)).flatten(-2)
    decay = per_feature(torch.exp(m - c), z.shape[-1])
    return S * decay.unsqueeze(-1) + torch.matmul(phi_k.mT, block.value), z * decay + phi_k.sum(-2)


def forward(
    feature_map: GroupedFeatureMap,
    bias: Tensor | None,  # (B, H or 1, L)
    query: Tensor,  # (B, H, G, L, D)
    key: Tensor,  # (B, H, L, D)
    value: Tensor,  # (B, H, L, Dv)
    *before: Tensor,  # S (B, H, R, Dv), z (B, H, R), m (B, H, C)
    span: int = 0,
) -> tuple[Tensor, ...]:
    """Output, denominator, its exponent; S, z, m after the last token; S, z, m before segments, (B, K, H, …)."""
    state, space = Running(Sums(*before)), Workspace(before[0])
    batch, heads, groups, length, _ = query.shape
    out = query.new_empty(batch, heads, groups, length, value.shape[-1])
    den = before[0].new_empty(batch, heads, groups, length)
    reference = torch.empty_like(den)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=True, span=span)
    checkpoints = [x.new_empty(batch, num_checkpoints(length, size), *x.shape[1:]) for x in before]
    for index, (start, stop) in enumerate(blocks(length, size)):
        if index and index % SEGMENT == 0:
            for kept, now in zip(checkpoints, state.views(), strict=True):
                kept[:, index // SEGMENT - 1] = now
        part = columns(bias, start, stop)
        block = _block(query, key, value, part, start, stop, space)
        num, total, ref = rows(feature_map, block, part, span, state.views())
        shape = (groups, stop - start)
        out[..., start:stop, :] = num.div_(total.masked_fill(total == 0, torch.inf).unsqueeze(-1)).unflatten(2, shape)
        den[..., start:stop], reference[..., start:stop] = total.unflatten(2, shape), ref.unflatten(2, shape)
        buffer = space.buffer("keys", *block.key.shape[:-1], feature_map.num_features)
        keys = key_block(feature_map, block.key, part, buffer)
        state.rescale(keys.peak(state.m))
        state.fold_in(keys.relative_to(state.m).flatten(0, 1), block.value.flatten(0, 1))
    return out, den, reference, *state.sums(), *checkpoints


def _block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, start: int, stop: int, space: Workspace
) -> Block:
    """A block's tokens."""
    k, v = (space.rows(name, x[:, :, start:stop], bias) for name, x in (("k", key), ("v", value)))
    return Block(space.rows("q", query[..., start:stop, :]).flatten(2, 3), k, v)


def backward(
    feature_map: GroupedFeatureMap,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    bias_grad: bool,
    span: int = 0,
) -> Gradients:
    """Gradients of (query, key, value, S, z), block by block from the last by autograd."""
    query, key, value, *before = inputs
    batch, heads, groups, length, _ = query.shape
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
    grad_state = [grads[3].clone(), grads[4].clone()]
    totals = [torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in tensors]
    of_bias = BiasGradient(bias, wanted=bias_grad)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=True, span=span)
    bounds = list(blocks(length, size))
    for first in reversed(range(0, len(bounds), SEGMENT)):
        kept = before if first == 0 else [x[:, first // SEGMENT - 1] for x in outputs[6:]]
        segment = bounds[first : first + SEGMENT]
        entries = _entries(feature_map, bias, key, value, Sums(*kept), segment)
        for (start, stop), entry in reversed(list(zip(segment, entries, strict=True))):
            part = columns(bias, start, stop)
            block = _block(query, key, value, part, start, stop, Workspace(entry.S))
            leaves = [x.detach().requires_grad_() for x in (*block, entry.S, entry.z)]
            if part is not None and bias_grad:
                part = part.detach().requires_grad_()
                leaves.append(part)
            with torch.enable_grad():
                before_block, tokens = Sums(leaves[3], leaves[4], entry.m), Block(*leaves[:3])
                num, den, ref = rows(feature_map, tokens, part, span, before_block)
                out = num / den.masked_fill(den == 0, torch.inf).unsqueeze(-1)
                S, z = after(feature_map, tokens, part, before_block)
            given = [x[:, :, :, start:stop].flatten(2, 3).to(S.dtype) for x in grads[:3]]
            found = pulled((out, den, ref, S, z), (*leaves, *tensors), (*given, *grad_state))
            grad_query[..., start:stop, :] = found[0].unflatten(2, (groups, stop - start))
            store_masked(grad_key[:, :, start:stop], found[1], part)
            store_masked(grad_value[:, :, start:stop], found[2], part)
            grad_state = list(found[3:5])
            of_bias.store(start, stop, found[5:6])
            for total, grad in zip(totals, found[len(leaves) :], strict=True):
                total += grad
    return Gradients([grad_query, grad_key, grad_value, *grad_state], of_bias.total, totals)


def _entries(
    feature_map: GroupedFeatureMap,
    bias: Tensor | None,
    key: Tensor,
    value: Tensor,
    before: Sums,
    segment: list[tuple[int, int]],
) -> list[Sums]:
    """The state before each block of a segment."""
    state, space, found = Running(before), Workspace(before.S), []
    for start, stop in segment:
        found.append(Sums(*(x.clone() for x in state.views())))
        part = columns(bias, start, stop)
        k, v = (space.rows(name, x[:, :, start:stop], part) for name, x in (("k", key), ("v", value)))
        keys = key_block(feature_map, k, part, space.buffer("keys", *k.shape[:-1], feature_map.num_features))
        state.rescale(keys.peak(state.m))
        state.fold_in(keys.relative_to(state.m).flatten(0, 1), v.flatten(0, 1))
    return found
