"""What the folds of expansions share: sizes, the map's constants, queries sorted by centre, launches.

Letters as in kernels/centres.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from linattn.attention.backends.blocked.grouped_reading import groups_of
from linattn.attention.backends.triton.kernels.blocks import Cut, Rows
from linattn.attention.backends.triton.kernels.centres import Expanded, Places, Sorted
from linattn.attention.backends.triton.launching import bias_rows, launch, rows
from linattn.attention.backends.triton.tiles import capability, expanded, tuned_expanded
from linattn.attention.sums import per_feature
from linattn.feature_maps import Expansion

# The fewest and the most tokens of a group, and how many of them a centre should have: as many as a tile has rows.
_SHORTEST, _LONGEST, _ROWS = 64, 1024, 32


class Moments(NamedTuple):
    """Parts of states around centres, or gradients of such, relative to powers of two of their own."""

    S: Tensor  # (…, R, Dv)
    z: Tensor  # (…, R)
    peak: Tensor  # (…, K)

    def to(self, peak: Tensor) -> Moments:
        """The same relative to other powers."""
        fall = per_feature(torch.exp2(self.peak - peak), self.z.shape[-1])
        return Moments(self.S * fall.unsqueeze(-1), self.z * fall, peak)

    def plus(self, other: Moments) -> Moments:
        """The sum of both, relative to the higher powers."""
        peak = torch.maximum(self.peak, other.peak)
        one, two = self.to(peak), other.to(peak)
        return Moments(one.S + two.S, one.z + two.z, peak)


class Around(NamedTuple):
    """What one call's kernels share."""

    feature_map: Expansion
    shape: Expanded
    places: Places
    cut: Cut
    device: torch.device

    def as_operand(self, x: Tensor) -> Tensor:
        """Tokens as the kernels read them; an interpreter cannot calculate with bfloat16."""
        return x.float() if self.shape.emulated else x

    def rows(self, x: Tensor) -> Rows:
        """Tokens (B, heads, L, ·) likewise."""
        return rows(self.as_operand(x))

    def biases(self, bias: Tensor | None) -> Rows:
        """Biases (B, H or 1, L); where there are none, memory that no kernel reads."""
        return Rows(self.places.spread, 0, 0, 0) if bias is None else bias_rows(bias)

    def run(self, kernel: Any, programs: int, arguments: Sequence[Any], flags: Sequence[bool]) -> None:
        """Launch so many programs of a kernel."""
        shape, tuning = tuned_expanded(kernel.__name__, self.shape, capability(self.device))
        launch(kernel, programs, (*arguments, shape, *flags), tuning)


def plan(
    feature_map: Expansion, like: Tensor, sizes: tuple[int, int, int, int, int], *, span: int, is_backward: bool
) -> Around:
    """The work of a call on tokens `like` these, with (B, H, G, L, Dv), cut into groups of `span` tokens."""
    _, heads, members, length, dv = sizes
    shape = expanded(feature_map, dv, like.dtype, is_backward=is_backward)
    per_group, num_groups = triton.cdiv(span, shape.block), triton.cdiv(length, span) if length else 0
    rest = length - (num_groups - 1) * span
    num_blocks = (num_groups - 1) * per_group + triton.cdiv(rest, shape.block) if length else 0
    cut = Cut(length, span, per_group, num_blocks, num_groups, heads, members)
    return Around(feature_map, shape, _places(feature_map, shape), cut, like.device)


def plan_causal(
    feature_map: Expansion, like: Tensor, sizes: tuple[int, int, int, int, int], *, span: int, is_backward: bool
) -> Around:
    """The same of a causal call, whose rows see the keys of earlier spans of so many tokens; 0: up to their own."""
    return plan(feature_map, like, sizes, span=group_length(feature_map, span), is_backward=is_backward)


def group_length(feature_map: Expansion, span: int) -> int:
    """Tokens of a causal group, whole spans of them: so many that most centres fill a tile."""
    wanted = 1 << (_ROWS * feature_map.num_centres - 1).bit_length()
    wanted = min(max(wanted, _SHORTEST), _LONGEST)
    return triton.cdiv(wanted, span) * span if span else wanted


def _places(feature_map: Expansion, shape: Expanded) -> Places:
    """The map's constants in float32."""
    centres, key_mean, spread = feature_map.centres, feature_map.key_mean, feature_map.spread
    assert centres is not None, "a call of a map without centres binds its own"
    assert key_mean is not None, "centres come with a mean key"
    assert spread is not None, "centres come with the keys' spread"
    batch, heads = (1, 1, *centres.shape[:-2])[-2:]
    spread = spread.float().reshape(batch * heads).contiguous()
    sets = constants(centres, shape), constants(key_mean, shape)
    return Places(*sets, spread, feature_map.scale, heads if batch > 1 else 0, int(heads > 1))


def constants(x: Tensor, shape: Expanded) -> Tensor:
    """Vectors (…, n, D) of each set of the map's constants in float32, (sets, n, padded D)."""
    return F.pad(x.float(), (0, shape.padded_d - shape.d)).reshape(-1, x.shape[-2], shape.padded_d).contiguous()


def sort(work: Around, query: Tensor, *, span: int) -> Sorted:
    """Queries (B, H, G, L, D) by group, centre and token; rows of causal calls with a `span` see earlier ones only."""
    cut, num_centres = work.cut, work.shape.num_centres
    batch, heads, members, length, _ = query.shape
    with torch.no_grad():
        centre = groups_of(work.feature_map, query.flatten(2, 3), torch.float32)
    centre = centre.view(batch * heads, members, length).mT
    group = torch.arange(length, device=work.device).div(cut.span, rounding_mode="floor").view(-1, 1)
    ordered = (group * num_centres + centre).to(torch.int32).flatten(1).sort(dim=-1, stable=True)
    # Not by a count, which the host would have to wait for.
    bounds = torch.arange(cut.num_groups * num_centres + 1, device=work.device, dtype=torch.int32)
    bounds = bounds.expand(batch * heads, -1).contiguous()
    starts = torch.searchsorted(ordered.values, bounds, out_int32=True)
    num_tiles = triton.cdiv(min(cut.span, length) * members, work.shape.rows) + num_centres
    return Sorted(ordered.indices.to(torch.int32).contiguous(), starts, num_tiles, span)
