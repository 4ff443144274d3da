"""The causal fold of grouped maps: a query's features depend on the sums z over the very keys it sees.

Per block: the weights of its own keys under each query's own group, each row on a scale of its own, so that no later
key can underflow it; their sums z beside those of the state; the query features; then both parts of the output. Letters
as in blocked/__init__.py; C groups, F = R/C features of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Running, Workspace
from linattn.attention.backends.blocked.features import (
    BiasGradient,
    KeyBlocks,
    Keys,
    query_rows,
    store_masked,
    store_queries,
)
from linattn.attention.backends.blocked.grouped_reading import flat_groups, tiles
from linattn.attention.backends.blocked.records import Causal, Saved
from linattn.attention.sums import Sums, lowest, per_feature
from linattn.feature_maps import GroupedFeatureMap
from linattn.feature_maps._map_gradients import MapGradients
from linattn.softmax.attention import causal_mask


class BlockState(NamedTuple):
    """A block as the recomputation of its segment left it."""

    block: slice
    before: Sums
    c: Tensor  # the exponent after it, (B, H, M)
    x: Tensor  # its keys (B, H, n, D)
    keys: Keys  # an exponential map's are turned relative to c
    phi_k: Tensor  # (B, H, n, R), relative to c
    safe: Tensor | None  # (B, H) bool: heads whose rows share c; None for all


class TokenGradients(NamedTuple):
    """Gradients of a call's tokens, block by block."""

    query: Tensor  # (B, H, G, L, D)
    key: Tensor  # (B, H, L, D)
    value: Tensor  # (B, H, L, Dv)


class Block(NamedTuple):
    """A block's tokens, in the accumulation dtype."""

    query: Tensor  # (B, H, G·n, D)
    key: Tensor  # (B, H, n, D), masked ones 0
    value: Tensor  # (B, H, n, Dv), masked ones 0
    bias: Tensor | None  # (B, H or 1, n)


class GroupedRows:
    """A block's rows, each on a scale of its own."""

    def __init__(self, feature_map: GroupedFeatureMap, inputs: Causal, span: int) -> None:
        self.map, self.query, self.span, self.space = feature_map, inputs.query, span, Workspace(inputs.S)
        self.keys = KeyBlocks(feature_map, inputs, self.space)

    def advance(self, block: slice, state: Running) -> tuple[Tensor, Tensor, Tensor]:
        """Num (B, H, G·n, Dv), den and its exponent (B, H, G·n); the block is folded in."""
        tokens = self.tokens(block)
        block_rows = rows(self.map, tokens, self.span, state.views())
        keys = self.keys.features(block, state.m, tokens.key)
        state.rescale(keys.peak(state.m))
        state.fold_in(keys.relative_to(state.m), tokens.value)
        return block_rows

    def tokens(self, block: slice) -> Block:
        """Load a block."""
        query = query_rows(self.query, block, self.space)
        return Block(query, self.keys.tokens(block), self.keys.values(block), self.keys.bias(block))


class GroupedGradients(GroupedRows):
    """The gradients of blocks by autograd."""

    keeps_features = False

    def __init__(self, feature_map: GroupedFeatureMap, saved: Saved, span: int) -> None:
        super().__init__(feature_map, saved.inputs, span)
        self.back, self._grads = MapGradients(feature_map, saved.tensors), saved.grads
        self.of_bias = BiasGradient(saved.inputs.bias, saved.inputs.key.shape[1], wanted=saved.bias_grad)

    def safe_heads(self, *_: object) -> None:
        """Everywhere: no rows share an exponent."""

    def pull(self, visit: BlockState, grad_S: Tensor, grad_z: Tensor, tokens: TokenGradients) -> tuple[Tensor, Tensor]:
        """Gradients of S and z before a block, from those after it; its tokens' are stored."""
        block, loaded, masked = visit.block, self.tokens(visit.block), self.keys.masked(visit.block)
        leaves = [x.detach().requires_grad_() for x in (*loaded[:3], visit.before.S, visit.before.z)]
        bias = loaded.bias
        if bias is not None and self.of_bias.of_heads is not None:
            bias = bias.detach().expand(loaded.key.shape[:-1]).requires_grad_()
            leaves.append(bias)
        query, key, value, S, z = leaves[:5]
        with torch.enable_grad():
            before, leaf = Sums(S, z, visit.before.m), Block(query, key, value, bias)
            num, den, reference = rows(self.map, leaf, self.span, before)
            out = num / den.masked_fill(den == 0, torch.inf).unsqueeze(-1)
            sums = after(self.map, leaf, before)
        of_rows = (self._grads.out, self._grads.den, self._grads.reference)
        wanted = [x[:, :, :, block].flatten(2, 3).to(S.dtype) for x in of_rows]
        gradients = self.back.pull((out, den, reference, *sums), leaves, (*wanted, grad_S, grad_z))
        for of_bias in gradients[5:]:
            self.of_bias.store(block, masked, of_bias)
        store_queries(tokens.query[..., block, :], gradients[0])
        store_masked(tokens.key[:, :, block], masked, gradients[1])
        store_masked(tokens.value[:, :, block], masked, gradients[2])
        return gradients[3], gradients[4]


def rows(feature_map: GroupedFeatureMap, block: Block, span: int, before: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """Num (B, H, G·n, Dv), den and its exponent (B, H, G·n) of a block's queries, differentiable by autograd."""
    m, group, flat = before.m, feature_map.group(block.query), flat_groups(feature_map, before)
    # Which of the groups of all heads, (B·H·N,): whole rows are picked, several times as fast as single numbers.
    which = torch.arange(m.shape[0] * m.shape[1], device=m.device).view(*m.shape[:2], 1) * feature_map.num_groups
    which = (group + which).flatten()
    psi, log = feature_map.key(block.key), feature_map.key_log_weight(block.key)
    length = block.key.shape[-2]
    exponents = log.mT.reshape(m.numel(), length).index_select(0, which).view(*group.shape, length)
    if block.bias is not None:
        exponents = exponents + block.bias.unsqueeze(-2)
    visible = causal_mask(length, length, m.device, span).repeat(group.shape[-1] // length, 1)
    exponents = torch.where(visible, exponents, -torch.inf)
    from_state = flat.m.index_select(0, which).view(group.shape)
    reference = torch.maximum(exponents.detach().amax(-1), from_state).clamp(min=lowest(m.dtype))
    weights = torch.exp(exponents - reference.unsqueeze(-1))
    decay = torch.exp(from_state - reference).unsqueeze(-1)
    # The features come last: they need the sums z over the block's own past and the state.
    own_z = flat.z.squeeze(1).index_select(0, which).unflatten(0, group.shape)
    own_z = torch.matmul(weights, psi) + decay * own_z
    place = flat.places.squeeze(1).index_select(0, which).unflatten(0, group.shape)
    phi_q, log_weight = feature_map.local_query(block.query, place, own_z)
    num = torch.matmul(weights * torch.matmul(phi_q, psi.mT), block.value)
    num = num + decay * read_groups(phi_q, group, flat.S, feature_map.num_groups)
    return num, feature_map.normalizer(phi_q, own_z), reference + log_weight


def read_groups(phi_q: Tensor, group: Tensor, S: Tensor, num_groups: int) -> Tensor:
    """φ(q)ᵀS of each query's own group: (B, H, N, F), (B, H, N), (B·H·C, F, Dv) -> (B, H, N, Dv)."""
    cut = tiles(group, num_groups)
    products = torch.bmm(cut.pick(phi_q.flatten(0, 2)), S.index_select(0, cut.group))
    out = products.new_empty(group.numel() + 1, S.shape[-1])
    return out.index_copy(0, cut.target, products.flatten(0, 1))[:-1].view(*group.shape, S.shape[-1])


def after(feature_map: GroupedFeatureMap, block: Block, before: Sums) -> tuple[Tensor, Tensor]:
    """S and z after a block, relative to the maximum of their exponents then; differentiable by autograd."""
    S, z, m = before
    psi, log = feature_map.key(block.key), feature_map.key_log_weight(block.key)
    if block.bias is not None:
        log = log + block.bias.unsqueeze(-1)
    c = torch.maximum(m, log.detach().amax(-2))
    phi_k = (torch.exp(log - c.unsqueeze(-2)).unsqueeze(-1) * psi.unsqueeze(-2)).flatten(-2)
    decay = per_feature(torch.exp(m - c), z.shape[-1])
    return S * decay.unsqueeze(-1) + torch.matmul(phi_k.mT, block.value), z * decay + phi_k.sum(-2)
