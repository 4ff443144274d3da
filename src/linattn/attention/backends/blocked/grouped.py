"""The folds of grouped maps, whose queries read one group of features each; letters as in blocked/__init__.py.

Queries that read a state are sorted by group and cut into tiles of one group each, so that a tile reads its group's
sums by one product: N = G·L queries of each of B·H rows, C groups, F = R/C features of a group, T queries of a tile, t
tiles. Causally a query's features depend on the sums z over the very keys it sees. Per block: the weights of its own
keys under each query's own group, each row on a scale of its own, so that no later key can underflow it; their sums z
beside those of the state; the query features; then both parts of the output.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked import features
from linattn.attention.backends.blocked.biases import Biases
from linattn.attention.backends.blocked.blocks import Running, Workspace
from linattn.attention.backends.blocked.records import Causal, Gradients, Read, Saved, sums_of
from linattn.attention.sums import Sums, lowest, per_feature
from linattn.feature_maps import GroupedFeatureMap
from linattn.feature_maps.base import pulled
from linattn.feature_maps.map_gradients import MapGradients
from linattn.softmax.attention import causal_mask
from linattn.softmax.precision import accumulation_dtype

# Numbers of a chunk's widest tensor, the tiles' sums or the queries' features.
_CHUNK = 2**20
_SMALLEST, _LARGEST = 8, 128


class Tiles(NamedTuple):
    """Tiles of queries of one group."""

    query: Tensor  # (t, T), which of the B·H·N queries; a tile's free places repeat one of its own
    group: Tensor  # (t,), which of the B·H·C groups
    free: Tensor  # (t, T) bool, places that only repeat
    spare: int  # B·H·N

    @property
    def target(self) -> Tensor:
        """(t·T,): where a tile's rows go in a tensor with one row to spare, which takes the free places'."""
        return torch.where(self.free, self.spare, self.query).flatten()

    def pick(self, rows: Tensor) -> Tensor:
        """The tiles' rows (t, T, ·) of rows (B·H·N, ·)."""
        return torch.unflatten(rows.index_select(0, self.query.flatten()), 0, self.query.shape)


def tiles(group: Tensor, num_groups: int) -> Tiles:
    """Sort queries by their group (B, H, N) and cut them into tiles."""
    rows, length = group.shape[:2].numel(), group.shape[-1]
    device, group = group.device, group.reshape(rows, length)
    order = group.sort(dim=-1, stable=True).indices
    order = (order + length * torch.arange(rows, device=device).unsqueeze(-1)).flatten()
    counts = (group + num_groups * torch.arange(rows, device=device).unsqueeze(-1)).flatten()
    counts, typical = torch.bincount(counts, minlength=rows * num_groups), length // num_groups
    size = min(max(1 << max(typical, 1).bit_length() - 1, _SMALLEST), _LARGEST)
    numbers = (counts + size - 1) // size
    which = torch.repeat_interleave(torch.arange(rows * num_groups, device=device), numbers)
    ordinal = torch.arange(len(which), device=device) - (numbers.cumsum(0) - numbers)[which]
    ends = counts.cumsum(0)
    place = ((ends - counts)[which] + ordinal * size).unsqueeze(-1) + torch.arange(size, device=device)
    last = ends[which].unsqueeze(-1) - 1
    return Tiles(order[torch.minimum(place, last)], which, place > last, len(order))


class Flat(NamedTuple):
    """The sums and the map's places, the groups of all heads in one row."""

    places: Tensor  # (B·H·C, 1, W)
    S: Tensor  # (B·H·C, F, Dv)
    z: Tensor  # (B·H·C, 1, F)
    m: Tensor  # (B·H·C,)

    def of(self, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Places, S and z of these groups (t,)."""
        return self.places.index_select(0, group), self.S.index_select(0, group), self.z.index_select(0, group)


def flat_groups(feature_map: GroupedFeatureMap, sums: Sums) -> Flat:
    """Sums and places, group by group."""
    S, z, m = sums
    count, num_local = m.numel(), feature_map.num_local
    S, z = S.reshape(count, num_local, S.shape[-1]), z.reshape(count, 1, num_local)
    return Flat(flat_places(feature_map, m), S, z, m.flatten())


def flat_places(feature_map: GroupedFeatureMap, m: Tensor) -> Tensor:
    """The map's places for every group of m (B, H, C): (B·H·C, 1, W)."""
    places = feature_map.places().to(m.dtype).expand(*m.shape, -1)
    return places.reshape(m.numel(), 1, places.shape[-1])


class TileReader:
    """Tiles of queries that read one group each; results have a spare row, which the tiles' free places write to."""

    def __init__(self, feature_map: GroupedFeatureMap, inputs: Read) -> None:
        self.feature_map, self.inputs = feature_map, inputs
        rows, num_groups = inputs.query.flatten(2, 3), feature_map.num_groups
        # Groups are found piece by piece: their distances are C numbers for each query.
        size = max(_CHUNK // max(rows.shape[:2].numel() * num_groups, 1), 64)
        pieces = [feature_map.group(x.to(inputs.S.dtype)) for x in rows.split(size, -2)]
        self.cut = tiles(torch.cat(pieces, -1), num_groups)
        self.tokens, self.flat = rows.reshape(-1, rows.shape[-1]), flat_groups(feature_map, sums_of(inputs))

    def parts(self) -> Iterator[Tiles]:
        """Chunks of consecutive tiles whose features and sums are small."""
        query, group, free, spare = self.cut
        size = max(_CHUNK // max(self.feature_map.num_local * (self.flat.S.shape[-1] + query.shape[-1]), 1), 1)
        for start in range(0, len(group), size):
            part = slice(start, start + size)
            yield Tiles(query[part], group[part], free[part], spare)

    def rows(self) -> Rows:
        """All rows, (B, H, G, L, …)."""
        S, count, shape = self.flat.S, len(self.tokens) + 1, self.inputs.query.shape[:-1]
        rows = Rows(self.tokens.new_empty(count, S.shape[-1]), S.new_empty(count), S.new_empty(count))
        for part in self.parts():
            num, den, log_weight = self._sums(self._queries(part), *self.flat.of(part.group))
            num.div_(den.masked_fill(den == 0, torch.inf).unsqueeze(-1))
            reference = log_weight + self.flat.m[part.group].unsqueeze(-1)
            for target, part_rows in zip(rows, (num.to(rows.out.dtype), den, reference), strict=True):
                target.index_copy_(0, part.target, part_rows.flatten(0, 1))
        return Rows(*(x[:-1].view(*shape, *x.shape[1:]) for x in rows))

    def _queries(self, part: Tiles) -> Tensor:
        """(t, T, D), in the accumulation dtype."""
        return part.pick(self.tokens).to(self.flat.S.dtype)

    def _sums(self, x: Tensor, place: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Num (t, T, Dv), den and the features' exponents (t, T) of queries, given places and sums per tile."""
        phi_q, log_weight = self.feature_map.local_query(x, place, z)
        den = self.feature_map.normalizer(phi_q, z)
        return torch.bmm(phi_q, S), den, log_weight


class TileGradients(TileReader):
    """The gradients of what tiles read, chunk by chunk by autograd."""

    def __init__(self, feature_map: GroupedFeatureMap, saved: Saved) -> None:
        super().__init__(feature_map, saved.inputs)
        self._tensors, self._flat_grads = saved.tensors, Rows(*(x.flatten(0, 3) for x in saved.grads))
        self._query = self.tokens.new_empty(len(self.tokens) + 1, self.tokens.shape[-1])
        self._grads = [torch.zeros_like(x) for x in (self.flat.places, self.flat.S, self.flat.z)]

    def gradients(self) -> Gradients:
        """Gradients of all inputs: those of a chunk's queries are stored, those of places and sums added up."""
        for part in self.parts():
            leaves = [x.detach().requires_grad_() for x in (self._queries(part), *self.flat.of(part.group))]
            with torch.enable_grad():
                num, den, log_weight = self._sums(*leaves)
                out = num / den.masked_fill(den == 0, torch.inf).unsqueeze(-1)
            grad_out, *grads = (x[part.query].to(den.dtype) for x in self._flat_grads)
            # Free places repeat a query: only its own place passes a gradient on.
            wanted = [grad_out.masked_fill(part.free.unsqueeze(-1), 0), *(x.masked_fill(part.free, 0) for x in grads)]
            grad_query, *sum_grads = pulled((out, den, log_weight), leaves, wanted)
            self._query.index_copy_(0, part.target, grad_query.flatten(0, 1).to(self._query.dtype))
            for total, grad in zip(self._grads, sum_grads, strict=True):
                total.index_add_(0, part.group, grad)
        query, S, z, m = self.inputs
        grad_places, grad_S, grad_z = self._grads
        totals = []
        if self._tensors:
            with torch.enable_grad():
                places = flat_places(self.feature_map, m)
            map_grads = pulled([places], self._tensors, [grad_places])
            totals = [x.to(accumulation_dtype(x.dtype)) for x in map_grads]
        return Gradients((self._query[:-1].view(query.shape), grad_S.view(S.shape), grad_z.view(z.shape)), None, totals)


class Loaded(NamedTuple):
    """A block's keys as the fold takes them in."""

    keys: features.Keys
    c: Tensor  # the exponent after it, (B, H, M)
    safe: Tensor | None = None  # (B, H) bool: heads whose rows share c; None for all
    biases: Biases | None = None  # those that are not within features
    within: Tensor | None = None  # (B, H, n), those that are, where they are not the call's


class BlockState(NamedTuple):
    """A block as the recomputation of its segment left it."""

    block: slice
    before: Sums  # their exponents without levels
    x: Tensor  # its keys (B, H, n, D)
    loaded: Loaded  # an exponential map's keys are turned relative to c
    phi_k: Tensor  # (B, H, n, R), relative to c
    factor: Tensor | None  # (B, H, M), which the sums before were multiplied by for these keys; None for 1


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
        self.keys = features.KeyBlocks(feature_map, inputs, self.space)

    def advance(self, block: slice, state: Running, loaded: Loaded) -> tuple[Tensor, Tensor, Tensor]:
        """Num (B, H, G·n, Dv), den and its exponent (B, H, G·n); the block is folded in."""
        tokens = self.tokens(block)
        block_rows = rows(self.map, tokens, self.span, state.views())
        state.rescale(loaded.c)
        state.fold_in(loaded.keys.relative_to(loaded.c), tokens.value)
        return block_rows

    def load(self, block: slice, state: Running, x: Tensor | None = None, slot: str = "") -> Loaded:
        """A block's keys."""
        keys = self.keys.features(block, state.m, x, slot)
        return Loaded(keys, keys.peak(state.m))

    def fold_in(self, state: Running, loaded: Loaded, phi_k: Tensor, values: Tensor) -> None:
        """Fold a block in."""
        state.fold_in(phi_k, values)

    def tokens(self, block: slice) -> Block:
        """Load a block."""
        query = features.query_rows(self.query, block, self.space)
        return Block(query, self.keys.tokens(block), self.keys.values(block), self.keys.bias(block))


class GroupedGradients(GroupedRows):
    """The gradients of blocks by autograd."""

    keeps_features = False

    def __init__(self, feature_map: GroupedFeatureMap, saved: Saved, span: int) -> None:
        super().__init__(feature_map, saved.inputs, span)
        self.back, self._grads = MapGradients(feature_map, saved.tensors), saved.grads
        self.of_bias = features.BiasGradient(saved.inputs.bias, saved.inputs.key.shape[1], wanted=saved.bias_grad)

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
        features.store(tokens.query[..., block, :], None, gradients[0])
        features.store(tokens.key[:, :, block], masked, gradients[1])
        features.store(tokens.value[:, :, block], masked, gradients[2])
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
    # φ(q)ᵀS of each query's own group, tile by tile; the row to spare takes what the tiles' free places read.
    cut, value_dim = tiles(group, feature_map.num_groups), flat.S.shape[-1]
    products = torch.bmm(cut.pick(phi_q.flatten(0, 2)), flat.S.index_select(0, cut.group))
    out = products.new_empty(group.numel() + 1, value_dim)
    out = out.index_copy(0, cut.target, products.flatten(0, 1))[:-1].view(*group.shape, value_dim)
    return num + decay * out, feature_map.normalizer(phi_q, own_z), reference + log_weight


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
