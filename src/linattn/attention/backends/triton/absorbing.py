"""Keys folded into sums, and back. Letters as in triton/__init__.py."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends.blocked.records import Absorb, Gradients, Saved, sums_of
from linattn.attention.backends.triton.gradients import Back
from linattn.attention.backends.triton.kernels.blocks import NO_KEY
from linattn.attention.backends.triton.kernels.key_states import key_states
from linattn.attention.backends.triton.launching import FoldedKeys, Work, fold_keys, plan
from linattn.attention.backends.triton.segments import as_sums, run_segments, whole_tiles
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap
from linattn.softmax.precision import LOG2_E


def absorb(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    work, folded, peaks = _folded(feature_map, inputs, saved=None)
    tokens = folded.key, folded.value, work.key_side.side(), folded.keys
    _, last = run_segments(work, key_states, tokens, peaks, None, is_kept=False)
    sums = as_sums(work, last, peaks[:, 0].view(inputs.key.shape[:2]), inputs.m.shape[-1])
    return sums.merge(sums_of(inputs))


def absorb_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """The gradients of key, value, S and z."""
    inputs: Absorb = saved.inputs
    work, folded, peaks = _folded(feature_map, inputs, saved=saved)
    of_S, of_z, num_features = saved.grads.S, saved.grads.z, work.shape.num_features
    before = per_feature(torch.exp(inputs.m - saved.outputs.m), num_features)
    # The sums are relative to m, which is at least the keys' own peak; that of masked keys is of no account.
    fall = torch.exp2((peaks[:, 0].view(*of_z.shape[:2], 1) - saved.outputs.m * LOG2_E).clamp(max=0))
    fall = per_feature(fall, num_features)
    states = whole_tiles(work, of_S * fall.unsqueeze(-1), of_z * fall)
    back = Back(work, saved, folded, peaks, (work.query_side.side(), work.key_side.side()))
    of_key, of_value, of_bias = back.keys(None, states)
    return Gradients((of_key, of_value, of_S * before.unsqueeze(-1), of_z * before), of_bias, back.finish())


def _folded(feature_map: FeatureMap, inputs: Absorb, *, saved: Saved | None) -> tuple[Work, FoldedKeys, Tensor]:
    """The keys as one group, and its peak, (B·H, 2)."""
    key, value, *_, bias = inputs
    batch, heads, length, _ = key.shape
    sizes = (batch, heads, 1, length, value.shape[-1])
    work = plan(feature_map, key, sizes, span=length, saved=saved)
    folded = fold_keys(work, key, value, bias)
    highest = torch.nn.functional.pad(folded.peaks, (1, 0), value=NO_KEY.value).amax(-1)
    return work, folded, highest.view(-1, 1).expand(-1, 2).contiguous()
