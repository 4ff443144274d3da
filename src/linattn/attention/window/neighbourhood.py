"""Exact attention between neighbouring blocks as a fold, for autograd and graphs; letters as in window/__init__.py."""

from __future__ import annotations

from functools import partial

import torch

from linattn.attention.backends import Backend, Call
from linattn.attention.backends.blocked.fold import Fold, run
from linattn.attention.backends.blocked.records import Gradients, Saved
from linattn.attention.backends.reference import Reference
from linattn.feature_maps import FeatureMap
from linattn.softmax.neighbourhood import Near, Neighbourhood, empty_rows
from linattn.softmax.partial import Partial

# Weights held at once: they stay in a second-level cache of 2 MB.
_CHUNK = 2**19


def near(call: Call, backend: Backend, window: int) -> Partial:
    """Softmax of a call's rows, of the last of its tokens, over their block and both neighbours, or causally."""
    bias = None if call.bias is None else call.bias.expand(call.key.shape[:3])
    inputs, feature_map = Near(call.query, call.key, call.value, bias), call.bound.feature_map
    if isinstance(backend, Reference):
        # Autograd alone follows the reference, any number of times.
        return _around(feature_map, window, is_causal=call.is_causal).all_weights(inputs)
    rows: Partial = run(CAUSAL if call.is_causal else NEAR, call.bound, inputs, window)
    return rows


def _around(feature_map: FeatureMap, window: int, *, is_causal: bool) -> Neighbourhood:
    """Which keys are near, on the map's scale."""
    return Neighbourhood(window, is_causal, feature_map.scale, _CHUNK)


def _forward(feature_map: FeatureMap, inputs: Near, window: int, *, is_causal: bool) -> Partial:
    """The rows."""
    return _around(feature_map, window, is_causal=is_causal).rows(inputs)


def _backward(feature_map: FeatureMap, saved: Saved, window: int, *, is_causal: bool) -> Gradients:
    """Gradients of (query, key, value); the map's tensors have no part in it."""
    around, inputs = _around(feature_map, window, is_causal=is_causal), saved.inputs
    *grads, of_bias = around.gradients(inputs, saved.outputs.log_normalizer, saved.grads)
    of_tokens = [grad.to(x.dtype) for grad, x in zip(grads, inputs[:3], strict=True)]
    return Gradients(of_tokens, of_bias if saved.bias_grad else None, [torch.zeros_like(x) for x in saved.tensors])


def _fold(name: str, *, is_causal: bool) -> Fold:
    """The fold of this name in this file."""
    forward, backward = partial(_forward, is_causal=is_causal), partial(_backward, is_causal=is_causal)
    return Fold(f"{__name__}:{name}", forward, backward, Near, Partial, lambda inputs, _: empty_rows(inputs))


NEAR, CAUSAL = _fold("NEAR", is_causal=False), _fold("CAUSAL", is_causal=True)
