"""The fold by blocks in plain torch, forward and backward, on any device; the CPU's fast path.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, n tokens of a block, D head width, Dv
value width, R features, M exponents kept per head (the map's num_exponents).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from linattn.attention._blocked import fold, stepping
from linattn.attention._blocked.blocks import Moments as Moments
from linattn.attention._blocked.blocks import accumulation_dtype as accumulation_dtype
from linattn.attention._blocked.blocks import no_moments as no_moments
from linattn.attention._blocked.blocks import per_feature as per_feature
from linattn.feature_maps import FeatureMap, GroupedFeatureMap


def _run(
    task: fold.Task, feature_map: FeatureMap, own: Mapping[str, Tensor], mask: Tensor | None, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Run one fold, opaquely where a compiler is watching."""
    if not torch.compiler.is_compiling():
        return fold.run(task, feature_map, own, mask, *inputs)
    # Imported here: torch's marks for its compiler import the compiler.
    from linattn.attention._blocked import opaque

    return opaque.run(task, feature_map, own, mask, *inputs)


def attend(
    feature_map: FeatureMap,
    own: Mapping[str, Tensor],
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,  # (B, H, Lk, Dv)
    mask: Tensor | None,  # (B, H or 1, Lk)
    before: Moments,
    *,
    is_causal: bool,
    span: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Moments]:
    """Output, denominator, its exponent, and the moments after all keys; causal is aligned bottom-right.

    With `span`, for as many queries as keys, causal rows see the keys of earlier spans of so many tokens only.
    """
    if not is_causal:
        after = absorb(feature_map, own, key, value, mask, before)
        return *read(feature_map, own, query, after), after
    extra = key.shape[2] - query.shape[3]
    if extra > 0:
        head = None if mask is None else mask[..., :extra]
        before = absorb(feature_map, own, key[:, :, :extra], value[:, :, :extra], head, before)
        key, value, mask = key[:, :, extra:], value[:, :, extra:], None if mask is None else mask[..., extra:]
    grouped = isinstance(feature_map, GroupedFeatureMap)
    if key.shape[2] == 1 and extra >= 0 and not (span or grouped) and _is_bare(own, query, key, value, *before):
        with fold.outside_autocast(query.device):
            out, den, reference, S, z, m = stepping.forward(feature_map, mask, query, key, value, *before)
        return out, den, reference, Moments(S, z, m)
    early = query[..., : max(-extra, 0), :]
    late = query[..., max(-extra, 0) :, :]
    task = fold.Task("grouped_causal" if grouped else "causal", span)
    out, den, reference, S, z, m, *_ = _run(task, feature_map, own, mask, late, key, value, *before)
    rows, after = (out, den, reference), Moments(S, z, m)
    if extra < 0:
        first = read(feature_map, own, early, before)
        rows = (torch.cat((first[0], rows[0]), 3), torch.cat((first[1], rows[1]), 3), torch.cat((first[2], rows[2]), 3))
    return *rows, after


def _is_bare(own: Mapping[str, Tensor], *tensors: Tensor) -> bool:
    """Whether nothing follows a call: no compiler, gradient or transform, and no tensor of the map's for the call."""
    return not own and not torch.compiler.is_compiling() and not fold.is_followed(*tensors)


def absorb(
    feature_map: FeatureMap, own: Mapping[str, Tensor], key: Tensor, value: Tensor, mask: Tensor | None, before: Moments
) -> Moments:
    """The moments after these keys."""
    return Moments(*_run(fold.Task("absorb"), feature_map, own, mask, key, value, *before))


def read(
    feature_map: FeatureMap, own: Mapping[str, Tensor], query: Tensor, moments: Moments
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, denominator and its exponent of queries (B, H, G, L, D) reading the moments."""
    name = "grouped_read" if isinstance(feature_map, GroupedFeatureMap) else "read"
    out, den, reference = _run(fold.Task(name), feature_map, own, None, query, *moments)
    return out, den, reference


def query_log_weight(feature_map: FeatureMap, own: Mapping[str, Tensor], query: Tensor) -> Tensor | None:
    """The map's logarithmic weights (B, H, G, L) of queries (B, H, G, L, D), in plain differentiable torch."""
    if feature_map.exponential:
        return None
    weight: Tensor | None = fold.hosted(
        lambda hosted_map, x: hosted_map.query_log_weight(x), feature_map, own, query.device, query.flatten(2, 3)
    )
    return None if weight is None else weight.unflatten(-1, query.shape[2:4])


def column_mass(
    feature_map: FeatureMap,
    own: Mapping[str, Tensor],
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    mask: Tensor | None,  # (B, H or 1, Lk)
) -> Tensor:
    """How much all queries attend to each key, (B, H, Lk), by the map's own estimate; a constant for gradients."""
    query, key, own = query.detach(), key.detach(), {name: x.detach() for name, x in own.items()}
    with torch.no_grad():
        kept = accumulation_dtype(key.dtype)
        before = no_moments(feature_map, key.shape[0], key.shape[1], 0, kept, key.device)
        after = absorb(feature_map, own, key, key[..., :0], mask, before)
        (mass,) = _run(fold.Task("mass"), feature_map, own, mask, query, key, *after)
    return mass
