"""Read a state with queries that each use one group of its features; letters as in blocked/__init__.py.

Queries are sorted by group and cut into tiles of one group each, so that a tile reads its group's sums by one product:
N = G·L queries of each of B·H rows, C groups, F = R/C features of a group, T queries of a tile, t tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.features import Gradients, pulled
from linattn.attention.sums import accumulation_dtype
from linattn.feature_maps import GroupedFeatureMap

# Numbers of a chunk's widest tensor, the tiles' sums or the queries' features.
_CHUNK = 2**20
_SMALLEST, _LARGEST = 8, 128


class Tiles(NamedTuple):
    """Tiles of queries of one group.

    Attributes:
        query: (t, T), which of the B·H·N queries; a tile's free places repeat one of its own.
        group: (t,), which of the B·H·C groups.
        free: (t, T) bool, places that only repeat.
        spare: B·H·N.
    """

    query: Tensor
    group: Tensor
    free: Tensor
    spare: int

    def chunks(self, widest: int) -> Iterator[Tiles]:
        """Consecutive tiles, so many that a tensor of `widest` numbers per tile stays small."""
        size = max(_CHUNK // max(widest, 1), 1)
        for start in range(0, len(self.group), size):
            part = slice(start, start + size)
            yield Tiles(self.query[part], self.group[part], self.free[part], self.spare)

    @property
    def target(self) -> Tensor:
        """(t·T,): where a tile's rows go in a tensor with one row to spare, which takes the free places'."""
        return torch.where(self.free, self.spare, self.query).flatten()

    def pick(self, rows: Tensor) -> Tensor:
        """The tiles' rows (t, T, ·) of rows (B·H·N, ·)."""
        picked: Tensor = rows.index_select(0, self.query.flatten()).unflatten(0, self.query.shape)
        return picked


def tiles(group: Tensor, num_groups: int) -> Tiles:
    """Sort queries by their group (B, H, N) and cut them into tiles."""
    rows, length = group.shape[:2].numel(), group.shape[-1]
    device = group.device
    group = group.reshape(rows, length)
    order = group.sort(dim=-1, stable=True).indices
    order = (order + length * torch.arange(rows, device=device).unsqueeze(-1)).flatten()
    counts = (group + num_groups * torch.arange(rows, device=device).unsqueeze(-1)).flatten()
    counts = torch.bincount(counts, minlength=rows * num_groups)
    typical = length // num_groups
    size = min(max(1 << max(typical, 1).bit_length() - 1, _SMALLEST), _LARGEST)
    numbers = (counts + size - 1) // size
    which = torch.repeat_interleave(torch.arange(rows * num_groups, device=device), numbers)
    ordinal = torch.arange(len(which), device=device) - (numbers.cumsum(0) - numbers)[which]
    ends = counts.cumsum(0)
    place = ((ends - counts)[which] + ordinal * size).unsqueeze(-1) + torch.arange(size, device=device)
    last = ends[which].unsqueeze(-1) - 1
    return Tiles(order[torch.minimum(place, last)], which, place > last, len(order))


def read_tiles(
    feature_map: GroupedFeatureMap, x: Tensor, place: Tensor, S: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Num (t, T, Dv), den and own exponents (t, T) of queries (t, T, D); place (t, 1, W) and state per tile."""
    phi_q, log_weight = feature_map.local_query(x, place, z)
    den = feature_map.normalizer(phi_q, z)
    return torch.bmm(phi_q, S), den, log_weight


class Flat(NamedTuple):
    """The groups of all heads in one row: places (B·H·C, 1, W), S (B·H·C, F, Dv), z (B·H·C, 1, F), m (B·H·C,)."""

    places: Tensor
    S: Tensor
    z: Tensor
    m: Tensor


def flat_groups(feature_map: GroupedFeatureMap, S: Tensor, z: Tensor, m: Tensor) -> Flat:
    """The state and the map's places, group by group."""
    num_local, places = feature_map.num_local, feature_map.places().to(S.dtype).expand(*m.shape, -1)
    return Flat(
        places.reshape(m.numel(), 1, places.shape[-1]),
        S.reshape(m.numel(), num_local, S.shape[-1]),
        z.reshape(m.numel(), 1, num_local),
        m.flatten(),
    )


def groups_of(feature_map: GroupedFeatureMap, query: Tensor, dtype: torch.dtype) -> Tensor:
    """The groups (B, H, N) of queries (B, H, N, D), found piece by piece."""
    size = max(_CHUNK // max(query.shape[:2].numel() * feature_map.num_groups, 1), 64)
    pieces = [feature_map.group(x.to(dtype)) for x in query.split(size, -2)]
    return torch.cat(pieces, -1) if pieces else query.new_zeros(query.shape[:-1], dtype=torch.int64)


def spare_row(x: Tensor) -> Tensor:
    """Memory for rows like x's (..., W), flattened, and one more at the end."""
    return x.new_empty(x.shape[:-1].numel() + 1, x.shape[-1])


def forward(
    feature_map: GroupedFeatureMap,
    _bias: None,
    query: Tensor,  # (B, H, G, L, D)
    S: Tensor,  # (B, H, R, Dv)
    z: Tensor,  # (B, H, R)
    m: Tensor,  # (B, H, C)
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, H, G, L, Dv) in the query's dtype, the denominator and its exponent (B, H, G, L)."""
    shape, rows = query.shape[:4], query.flatten(2, 3)
    count = shape.numel()
    cut, flat = tiles(groups_of(feature_map, rows, S.dtype), feature_map.num_groups), flat_groups(feature_map, S, z, m)
    rows = rows.reshape(-1, rows.shape[-1])
    out, sums = query.new_empty(count + 1, S.shape[-1]), S.new_empty(count + 1, 2)
    for part in cut.chunks(flat.S.shape[1:].numel() + part_width(cut, feature_map)):
        x = part.pick(rows).to(S.dtype)
        num, den, own = read_tiles(feature_map, x, *(y.index_select(0, part.group) for y in flat[:3]))
        num.div_(den.masked_fill(den == 0, torch.inf).unsqueeze(-1))
        target = part.target
        out.index_copy_(0, target, num.flatten(0, 1).to(out.dtype))
        own = own + flat.m[part.group].unsqueeze(-1)
        sums.index_copy_(0, target, torch.stack((den.flatten(), own.flatten()), -1))
    # Copies even where there is one row or none: a compiled operator may not return two views of one memory.
    den, reference = (x.clone(memory_format=torch.contiguous_format).view(shape) for x in sums[:count].unbind(-1))
    return out[:count].view(*shape, S.shape[-1]), den, reference


def part_width(cut: Tiles, feature_map: GroupedFeatureMap) -> int:
    """Numbers of a tile's features."""
    return cut.query.shape[-1] * feature_map.num_local


def backward(
    feature_map: GroupedFeatureMap,
    tensors: Sequence[Tensor],
    _bias: None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    bias_grad: bool,
) -> Gradients:
    """Gradients of (query, S, z), chunk by chunk by autograd."""
    query, S, z, m = inputs
    rows = query.flatten(2, 3)
    cut = tiles(groups_of(feature_map, rows, S.dtype), feature_map.num_groups)
    rows = rows.reshape(-1, rows.shape[-1])
    with torch.enable_grad():
        flat = flat_groups(feature_map, S.detach(), z.detach(), m)
    grad_rows, grad_S, grad_z = spare_row(query), torch.zeros_like(flat.S), torch.zeros_like(flat.z)
    grad_places = torch.zeros_like(flat.places)
    given = [grads[0].flatten(0, 3), grads[1].flatten(), grads[2].flatten()]
    for part in cut.chunks(flat.S.shape[1:].numel() + part_width(cut, feature_map)):
        leaves = [part.pick(rows).to(S.dtype), *(y.index_select(0, part.group).detach() for y in flat[:3])]
        with torch.enable_grad():
            leaves = [leaf.requires_grad_() for leaf in leaves]
            num, den, own = read_tiles(feature_map, *leaves)
            out = num / den.masked_fill(den == 0, torch.inf).unsqueeze(-1)
        wanted = [x[part.query].to(S.dtype) for x in given]
        wanted[0] = wanted[0].masked_fill(part.free.unsqueeze(-1), 0)
        wanted[1:] = [x.masked_fill(part.free, 0) for x in wanted[1:]]
        found = pulled((out, den, own), leaves, wanted)
        grad_rows.index_copy_(0, part.target, found[0].flatten(0, 1).to(grad_rows.dtype))
        for total, grad in zip((grad_places, grad_S, grad_z), found[1:], strict=True):
            total.index_add_(0, part.group, grad)
    totals = pulled_places(flat.places, grad_places, tensors)
    return Gradients([grad_rows[:-1].view(query.shape), grad_S.view(S.shape), grad_z.view(z.shape)], None, totals)


def pulled_places(places: Tensor, grad: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """From the places' gradient to those of the map's tensors, in at least float32."""
    if not tensors:
        return []
    return [x.to(accumulation_dtype(x.dtype)) for x in pulled([places], tensors, [grad])]
