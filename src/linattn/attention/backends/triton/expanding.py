"""The folds of expansions: keys into parts of states, each read by the queries around its centre, and back.

Letters as in kernels/centres.py, P segments of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.records import (
    Absorb,
    Causal,
    Gradients,
    Read,
    Saved,
    empty_sums,
    sums_of,
)
from linattn.attention.backends.blocked.rows import empty_rows
from linattn.attention.backends.triton.centring import Around, Moments, plan, plan_causal, sort
from linattn.attention.backends.triton.kernels.blocks import NO_KEY, KeyGradients
from linattn.attention.backends.triton.kernels.centre_key_gradients import centre_key_gradients
from linattn.attention.backends.triton.kernels.centre_query_gradients import centre_query_gradients
from linattn.attention.backends.triton.kernels.centre_rows import centre_rows
from linattn.attention.backends.triton.kernels.centre_state_gradients import centre_state_gradients
from linattn.attention.backends.triton.kernels.centre_states import centre_states
from linattn.attention.backends.triton.kernels.centres import RowScalars, Sorted
from linattn.attention.backends.triton.segments import num_processors, side_by_side
from linattn.attention.sums import Sums, lowest, per_feature
from linattn.feature_maps import Expansion
from linattn.feature_maps._powers import LOG2_E

# The fewest rows of a head and centre that are worth a segment.
_FEWEST_ROWS = 256


class ExpandedRows(NamedTuple):
    """Rows, and the powers of two that their denominators are relative to."""

    out: Tensor  # (B, H, G, L, Dv)
    den: Tensor  # (B, H, G, L)
    reference: Tensor  # (B, H, G, L)
    peak: Tensor  # (B, H, G, L)


class ExpandedCausal(NamedTuple):
    """Those, and the sums after the last token."""

    out: Tensor
    den: Tensor
    reference: Tensor
    peak: Tensor
    S: Tensor  # (B, H, R, Dv)
    z: Tensor  # (B, H, R)
    m: Tensor  # (B, H, K)

    @property
    def rows(self) -> ExpandedRows:
        """The rows alone."""
        return ExpandedRows(*self[:4])


def empty_rows_of(inputs: Read | Causal) -> ExpandedRows:
    """Memory for the rows of these queries."""
    rows = empty_rows(inputs.query, inputs.S)
    return ExpandedRows(*rows, torch.empty_like(rows.den))


def empty_like(inputs: Causal, span: int) -> ExpandedCausal:
    """Memory for all outputs."""
    return ExpandedCausal(*empty_rows_of(inputs), *empty_sums(inputs))


def absorb(feature_map: Expansion, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    _, last = _fold_keys(_of_keys(feature_map, inputs, is_backward=False), inputs, None, is_kept=False)
    return _as_sums(last, inputs.m).merge(sums_of(inputs))


def absorb_backward(feature_map: Expansion, saved: Saved) -> Gradients:
    """The gradients of key, value, S and z."""
    inputs: Absorb = saved.inputs
    of_S, of_z, after = saved.grads.S, saved.grads.z, saved.outputs.m
    work = _of_keys(feature_map, inputs, is_backward=True)
    # Weights relative to the sums' own exponents are at most 1.
    peak = (after * LOG2_E).ceil().clamp(min=NO_KEY.value)
    lift = per_feature(torch.exp2(peak - after * LOG2_E), of_z.shape[-1])
    states = Moments(*_flat(of_S * lift.unsqueeze(-1), of_z * lift), peak.flatten(0, 1))
    peaks = torch.stack((states.peak, states.peak), 1)
    of_key, of_value, of_bias = _pull_keys(work, saved, None, states, peaks)
    before = per_feature(torch.exp(inputs.m - after), of_z.shape[-1])
    return Gradients((of_key, of_value, of_S * before.unsqueeze(-1), of_z * before), of_bias, _no_gradients(saved))


def read(feature_map: Expansion, inputs: Read) -> ExpandedRows:
    """All rows."""
    work = _of_rows(feature_map, inputs, is_backward=False)
    return _rows(work, inputs, _given_sums(sums_of(inputs)), sort(work, inputs.query, span=0))


def read_backward(feature_map: Expansion, saved: Saved) -> Gradients:
    """The gradients of query, S and z."""
    inputs: Read = saved.inputs
    work, before = _of_rows(feature_map, inputs, is_backward=True), _given_sums(sums_of(inputs))
    back = _Back(work, saved, sort(work, inputs.query, span=0))
    of_query = back.queries(before)
    peaks = before.peak.unsqueeze(1).expand(-1, work.cut.num_groups + 1, -1).contiguous()
    _, first = back.states(peaks, None, is_kept=False)
    return Gradients((of_query, *_of_sums(first, inputs.m)), None, _no_gradients(saved))


def causal(feature_map: Expansion, inputs: Causal, span: int = 0) -> ExpandedCausal:
    """Rows over the given sums and their own past; with `span`, over the keys of earlier spans of so many tokens."""
    work = _of_both(feature_map, inputs, span, is_backward=False)
    states, last = _fold_keys(work, inputs, _given_sums(sums_of(inputs)), is_kept=True)
    rows = _rows(work, inputs, states, sort(work, inputs.query, span=span))
    return ExpandedCausal(*rows, *_as_sums(last, inputs.m))


def causal_backward(feature_map: Expansion, saved: Saved, span: int = 0) -> Gradients:
    """The gradients of query, key, value, S and z."""
    inputs: Causal = saved.inputs
    work = _of_both(feature_map, inputs, span, is_backward=True)
    states, last = _fold_keys(work, inputs, _given_sums(sums_of(inputs)), is_kept=True)
    back = _Back(work, saved, sort(work, inputs.query, span=span))
    of_query = back.queries(states)
    between = states.peak.unflatten(0, (len(last.peak), work.cut.num_groups))
    peaks = torch.cat((between, last.peak.unsqueeze(1)), 1).contiguous()
    # The sums were returned relative to these powers.
    after = Moments(*_flat(saved.grads.S, saved.grads.z), last.peak)
    of_states, first = back.states(peaks, after, is_kept=True)
    of_key, of_value, of_bias = _pull_keys(work, saved, back, of_states, peaks)
    return Gradients((of_query, of_key, of_value, *_of_sums(first, inputs.m)), of_bias, _no_gradients(saved))


def _of_keys(feature_map: Expansion, inputs: Absorb, *, is_backward: bool) -> Around:
    """The work on keys alone, one group."""
    batch, heads, length, _ = inputs.key.shape
    sizes = (batch, heads, 1, length, inputs.value.shape[-1])
    return plan(feature_map, inputs.key, sizes, span=max(length, 1), is_backward=is_backward)


def _of_rows(feature_map: Expansion, inputs: Read, *, is_backward: bool) -> Around:
    """The work on queries alone, in as many groups as keep a GPU busy."""
    batch, heads, members, length, _ = inputs.query.shape
    units = length * members // (feature_map.num_centres * _FEWEST_ROWS)
    programs = batch * heads * feature_map.num_centres
    _, count = side_by_side(max(units, 1), programs, num_processors(inputs.query.device))
    sizes = (batch, heads, members, length, inputs.S.shape[-1])
    return plan(feature_map, inputs.query, sizes, span=max(-(-length // count), 1), is_backward=is_backward)


def _of_both(feature_map: Expansion, inputs: Causal, span: int, *, is_backward: bool) -> Around:
    """The work on as many queries as keys."""
    sizes = (*inputs.query.shape[:4], inputs.value.shape[-1])
    return plan_causal(feature_map, inputs.key, sizes, span=span, is_backward=is_backward)


def _flat(S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """S and z with heads flattened."""
    return S.flatten(0, 1).contiguous(), z.flatten(0, 1).contiguous()


def _given_sums(sums: Sums) -> Moments:
    """Sums as the kernels take them."""
    peak = (sums.m * LOG2_E).ceil().clamp(min=NO_KEY.value)
    fall = per_feature(torch.exp2(sums.m * LOG2_E - peak), sums.z.shape[-1])
    return Moments(*_flat(sums.S * fall.unsqueeze(-1), sums.z * fall), peak.flatten(0, 1))


def _of_sums(found: Moments, m: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of sums that `_given_sums` was given, relative to m, from those of what it made of them."""
    peak = (m * LOG2_E).ceil().clamp(min=NO_KEY.value)
    fall = per_feature(torch.exp2(m * LOG2_E - peak), found.z.shape[-1])
    S, z = (x.unflatten(0, m.shape[:2]) for x in found[:2])
    return S * fall.unsqueeze(-1), z * fall


def _as_sums(found: Moments, like: Tensor) -> Sums:
    """Parts of states as sums relative to an exponent m `like` this one."""
    S, z, peak = (x.unflatten(0, like.shape[:2]) for x in found)
    return Sums(S, z, torch.where(peak <= NO_KEY.value, lowest(peak.dtype), peak / LOG2_E))


def _no_gradients(saved: Saved) -> list[Tensor]:
    """Those of what a call says of its own tokens, which is a constant."""
    return [torch.zeros_like(x) for x in saved.tensors]


def _empty(work: Around, count: int, dtype: torch.dtype) -> Moments:
    """Memory for so many states."""
    num_features, centres = work.feature_map.num_features, work.shape.num_centres
    S = torch.empty(count, num_features, work.shape.dv, dtype=dtype, device=work.device)
    z, peak = (torch.empty(count, x, dtype=torch.float32, device=work.device) for x in (num_features, centres))
    return Moments(S, z, peak)


def _kept_dtype(work: Around) -> torch.dtype:
    """What states between groups are kept in."""
    is_short = work.shape.operand.name == "bf16" and not work.shape.emulated
    return torch.bfloat16 if is_short else torch.float32


def _segments(work: Around, num_heads: int, units: int) -> tuple[int, int]:
    """Units of a segment, and the number of segments."""
    return side_by_side(units, num_heads * work.shape.num_centres, num_processors(work.device))


def _fold_keys(
    work: Around, inputs: Absorb | Causal, start: Moments | None, *, is_kept: bool
) -> tuple[Moments, Moments]:
    """The states before each group (B·H·J, …), and the one after the last, (B·H, …)."""
    cut, num_heads = work.cut, inputs.key.shape[:2].numel()
    kept = _empty(work, num_heads * cut.num_groups if is_kept else 0, _kept_dtype(work))
    unit = cut.per_group if is_kept else 1
    each, count = _segments(work, num_heads, -(-cut.num_blocks // unit)) if cut.num_blocks else (1, 1)
    given = work.rows(inputs.key), work.rows(inputs.value), work.biases(inputs.bias), work.places

    def run(before: Moments | None, *, is_kept: bool) -> Moments:
        last = _empty(work, num_heads * count, torch.float32)
        arguments = (*given, tuple(before or last), tuple(kept), tuple(last), cut, each * unit, count)
        programs = num_heads * count * work.shape.num_centres
        work.run(centre_states, programs, arguments, (inputs.bias is not None, before is not None, is_kept))
        return last

    if count == 1:
        return kept, run(start, is_kept=is_kept)
    totals = Moments(*(x.unflatten(0, (num_heads, count)) for x in run(None, is_kept=False)))
    state, found = start, list[Moments]()
    for segment in range(count):
        if state is not None:
            found.append(state)
        own = Moments(*(x[:, segment] for x in totals))
        state = own if state is None else state.plus(own)
    assert state is not None, "there is at least one segment"
    if is_kept:
        run(_stacked(found), is_kept=True)
    return kept, state


def _stacked(states: Sequence[Moments]) -> Moments:
    """States of segments, (B·H·P, …)."""
    return Moments(*(torch.stack(parts, 1).flatten(0, 1) for parts in zip(*states, strict=True)))


def _rows(work: Around, inputs: Read | Causal, states: Moments, cut: Sorted) -> ExpandedRows:
    """Read states, one before each group in a causal call."""
    query = inputs.query
    found = empty_rows_of(inputs)
    out = torch.empty_like(found.out, dtype=torch.float32) if work.shape.emulated else found.out
    is_causal = isinstance(inputs, Causal)
    bias = inputs.bias if isinstance(inputs, Causal) else None
    q = work.rows(query.flatten(1, 2))
    keys = (work.rows(inputs.key), work.rows(inputs.value)) if isinstance(inputs, Causal) else (q, q)
    arguments = q, *keys, work.biases(bias), work.places, cut, tuple(states), (out, *found[1:]), work.cut
    work.run(centre_rows, _num_tiles(work, query, cut), arguments, (bias is not None, is_causal))
    return found._replace(out=out.to(query.dtype))


def _num_tiles(work: Around, query: Tensor, cut: Sorted) -> int:
    """Programs for all tiles of queries."""
    return query.shape[:2].numel() * work.cut.num_groups * cut.num_tiles if query.numel() else 0


class _Back:
    """The gradients of rows, and what they pass on to states and keys."""

    def __init__(self, work: Around, saved: Saved, cut: Sorted) -> None:
        self.work, self.saved, self.cut = work, saved, cut
        self.query, self.grad_out = (work.rows(x.flatten(1, 2)) for x in (saved.inputs.query, saved.grads.out))
        self.scalars = RowScalars(*(torch.empty_like(saved.outputs.den) for _ in RowScalars._fields))

    def queries(self, states: Moments) -> Tensor:
        """The gradient of the queries (B, H, G, L, D), which read these states."""
        work, (inputs, outputs, grads) = self.work, self.saved[:3]
        is_causal, bias = isinstance(inputs, Causal), getattr(inputs, "bias", None)
        dtype = torch.float32 if work.shape.emulated else inputs.query.dtype
        found = torch.empty(inputs.query.shape, dtype=dtype, device=work.device)
        keys = (work.rows(inputs.key), work.rows(inputs.value)) if is_causal else (self.query, self.query)
        rows = outputs.den, outputs.peak, grads.den.contiguous(), grads.reference.contiguous()
        given = self.query, *keys, work.biases(bias), work.places, self.cut, tuple(states), self.grad_out, rows
        programs = _num_tiles(work, inputs.query, self.cut)
        flags = bias is not None, is_causal
        work.run(centre_query_gradients, programs, (*given, self.scalars, found, work.cut), flags)
        return found.to(inputs.query.dtype)

    def states(self, peaks: Tensor, start: Moments | None, *, is_kept: bool) -> tuple[Moments, Moments]:
        """Gradients of the states after each group (B·H·J, …), relative to peaks (B·H, J + 1, K), and before all."""
        work, cut, num_heads = self.work, self.work.cut, peaks.shape[0]
        kept = _empty(work, num_heads * cut.num_groups if is_kept else 0, _kept_dtype(work))
        is_causal = isinstance(self.saved.inputs, Causal)
        each, count = _segments(work, num_heads, cut.num_groups) if cut.num_groups else (1, 1)
        given = self.query, work.places, self.cut, self.grad_out, self.saved.outputs.peak, self.scalars, peaks

        def run(before: Moments | None, *, is_kept: bool) -> Moments:
            last = _empty(work, num_heads * count, torch.float32)
            arguments = (*given, tuple(before or last)[:2], tuple(kept)[:2], tuple(last)[:2], cut, each, count)
            flags = before is not None, is_causal, is_kept
            work.run(centre_state_gradients, num_heads * count * work.shape.num_centres, arguments, flags)
            return last

        if count == 1:
            return kept, run(start, is_kept=is_kept)
        totals = Moments(*(x.unflatten(0, (num_heads, count)) for x in run(None, is_kept=False)))
        if start is None:
            return kept, Moments(totals.S.sum(1), totals.z.sum(1), peaks[:, 0])
        state, found = start, list[Moments]()
        bounds = [min(segment * each, cut.num_groups) for segment in range(count + 1)]
        for segment in reversed(range(count)):
            found.append(state)
            # Gradients fall with what they are gradients of.
            fall = torch.exp2(peaks[:, bounds[segment]] - peaks[:, bounds[segment + 1]])
            fall = per_feature(fall, state.z.shape[-1])
            S, z = state.S * fall.unsqueeze(-1) + totals.S[:, segment], state.z * fall + totals.z[:, segment]
            state = Moments(S, z, peaks[:, bounds[segment]])
        if is_kept:
            run(_stacked(found[::-1]), is_kept=True)
        return kept, state


def _pull_keys(
    work: Around, saved: Saved, back: _Back | None, states: Moments, peaks: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of keys, values and biases from those of states after each group; of causal rows too."""
    key, value, bias = saved.inputs.key, saved.inputs.value, saved.inputs.bias
    dtype = torch.float32 if work.shape.emulated else key.dtype
    of_key, of_value = (torch.empty(x.shape, dtype=dtype, device=work.device) for x in (key, value))
    of_bias = torch.empty(key.shape[:3], dtype=torch.float32, device=work.device)
    k, v, biases = work.rows(key), work.rows(value), work.biases(bias)
    # What no kernel reads without rows.
    nothing = k, Sorted(peaks, peaks, 0, 0), v, peaks, RowScalars(*[peaks] * 5)
    rows = nothing if back is None else (back.query, back.cut, back.grad_out, saved.outputs.peak, back.scalars)
    query, cut, grad_out, highest, scalars = rows
    found = KeyGradients(of_key, of_value, of_bias)
    arguments = query, k, v, biases, work.places, cut, grad_out, highest, scalars, peaks, tuple(states)[:2], found
    programs = key.shape[:2].numel() * work.cut.num_blocks
    work.run(centre_key_gradients, programs, (*arguments, work.cut), (bias is not None, back is not None))
    total = None
    if saved.bias_grad:
        total = of_bias.sum(1, keepdim=True) if bias.shape[1] == 1 < of_bias.shape[1] else of_bias
        total = total.to(bias.dtype)
    return of_key.to(key.dtype), of_value.to(value.dtype), total
