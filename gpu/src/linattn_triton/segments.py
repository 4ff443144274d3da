"""Sums over groups of blocks, one after the other, and side by side where there are fewer heads than processors.

Letters as in linattn_triton, J groups, P segments of groups, T = tiles·F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from linattn.attention.sums import Sums, lowest
from linattn.softmax.precision import LOG2_E
from linattn_triton.kernels.blocks import HEADROOM, NO_KEY
from linattn_triton.launching import Work

# Programs for each multiprocessor, so that all are busy, and the fewest groups or blocks that are worth a segment.
_PROGRAMS, _FEWEST = 4, 8


class States(NamedTuple):
    """States of whole tiles, (…, T, Dv) and (…, T)."""

    S: Tensor
    z: Tensor

    def times(self, factor: Tensor) -> States:
        """Both times factors of the heads, (B·H,), or of features, (B·H, T)."""
        factor = factor.unsqueeze(-1) if factor.dim() == 1 else factor
        return States(self.S * factor.unsqueeze(-1), self.z * factor)

    def plus(self, other: States) -> States:
        """The sum of both."""
        return States(self.S + other.S, self.z + other.z)


def empty_states(work: Work, count: int, dtype: torch.dtype, device: torch.device) -> States:
    """Memory for so many."""
    size = work.shape.total
    S = torch.empty(count, size, work.shape.dv, dtype=dtype, device=device)
    return States(S, torch.empty(count, size, dtype=torch.float32, device=device))


def run_segments(
    work: Work, kernel: Any, tokens: tuple[Any, ...], peaks: Tensor, start: States | None, *, is_kept: bool
) -> tuple[States, States]:
    """The states that a kernel keeps for each group, (B·H·J, …), and the last one, (B·H, …).

    The kernel is `key_states`, which runs forward, or `state_gradients`, which runs backward; the states are relative
    to the peaks (B·H, J + 1) between groups.
    """
    num_heads, cut = peaks.shape[0], work.cut
    dtype = torch.bfloat16 if work.shape.operand.name == "bf16" and not work.shape.emulated else torch.float32
    states = empty_states(work, num_heads * cut.num_groups if is_kept else 0, dtype, peaks.device)
    if cut.num_blocks == 0:
        return states, start or States(
            *map(torch.zeros_like, empty_states(work, num_heads, torch.float32, peaks.device))
        )
    is_apart = cut.num_groups == 1 and start is None and not is_kept
    each, count = _segments(work, num_heads, _num_processors(peaks.device), is_apart=is_apart)

    def run(before: States | None, *, is_kept: bool) -> States:
        last = empty_states(work, num_heads * count, torch.float32, peaks.device)
        arguments = (*tokens, peaks, tuple(before or last), tuple(states), tuple(last), cut, each, count)
        work.run(kernel, num_heads * count, arguments, (before is not None, is_kept), by_tile=True)
        return last

    if count == 1:
        return states, run(start, is_kept=is_kept)
    totals = States(*(x.unflatten(0, (num_heads, count)) for x in run(None, is_kept=False)))
    if is_apart:
        return states, States(totals.S.sum(1), totals.z.sum(1))
    bounds = [min(segment * each // cut.per_group, cut.num_groups) for segment in range(count + 1)]
    # Not by an index, which would come from the host and break a CUDA graph.
    between = torch.stack([peaks[:, bound] for bound in bounds], 1)
    before, last = _in_turn(totals, start, between, is_backward=kernel.__name__ == "state_gradients")
    if is_kept:
        run(before, is_kept=True)
    return states, last


def _num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _segments(work: Work, num_heads: int, processors: int, *, is_apart: bool) -> tuple[int, int]:
    """Blocks of a segment, and the number of segments, which multiplies the programs until all processors are busy.

    Groups stay whole unless it is one without a state before.
    """
    unit, programs = 1 if is_apart else work.cut.per_group, num_heads * work.shape.total // work.shape.tile
    units, wanted = triton.cdiv(work.cut.num_blocks, unit), triton.cdiv(_PROGRAMS * processors, max(programs, 1))
    each = max(triton.cdiv(units, wanted), min(_FEWEST, units))
    return each * unit, triton.cdiv(units, each)


def _in_turn(totals: States, start: States | None, peaks: Tensor, *, is_backward: bool) -> tuple[States, States]:
    """The state that each segment starts from, (B·H·P, …), and the one after the last, from the segments' own."""
    count = peaks.shape[1] - 1
    state = start or States(torch.zeros_like(totals.S[:, 0]), torch.zeros_like(totals.z[:, 0]))
    starts: list[States] = []
    for segment in reversed(range(count)) if is_backward else range(count):
        starts.append(state)
        fall = torch.exp2(peaks[:, segment] - peaks[:, segment + 1])
        state = state.times(fall).plus(States(totals.S[:, segment], totals.z[:, segment]))
    if is_backward:
        starts.reverse()
    S, z = zip(*starts, strict=True)
    return States(torch.stack(S, 1).flatten(0, 1), torch.stack(z, 1).flatten(0, 1)), state


def whole_tiles(work: Work, S: Tensor, z: Tensor) -> States:
    """Sums (B, H, R, Dv) and (B, H, R) filled to whole tiles, heads flattened."""
    empty = work.shape.total - work.shape.num_features
    S, z = S.flatten(0, 1).contiguous(), z.flatten(0, 1).contiguous()
    return States(F.pad(S, (0, 0, 0, empty)), F.pad(z, (0, empty))) if empty else States(S, z)


def of_features(work: Work, states: States, batch: int) -> tuple[Tensor, Tensor]:
    """The sums (B, H, R, Dv) and (B, H, R) in states (B·H, …)."""
    features = slice(work.shape.num_features)
    return states.S[:, features].unflatten(0, (batch, -1)), states.z[:, features].unflatten(0, (batch, -1))


def headroom(work: Work) -> float:
    """By how much the kernels' features exceed those that a state's m is the largest exponent of, in powers of two."""
    return 0.0 if work.shape.kind == "features" else HEADROOM.value


def as_sums(work: Work, states: States, peak: Tensor, num_exponents: int) -> Sums:
    """States relative to a peak (B, H) as sums relative to m."""
    S, z = of_features(work, states, peak.shape[0])
    lift = 2.0 ** -headroom(work)
    m = torch.where(peak <= NO_KEY.value, lowest(peak.dtype), (peak + headroom(work)) * (1 / LOG2_E))
    return Sums(S * lift, z * lift, m.unsqueeze(-1).expand(*peak.shape, num_exponents).contiguous())
