"""Read a state with queries: out = φ(q)ᵀS / φ(q)ᵀz, block by block; letters as in blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Workspace, block_size, blocks
from linattn.attention.backends.blocked.features import (
    Gradients,
    MapGradients,
    normalised_query_features,
    query_block,
    query_features,
    query_gradient,
)
from linattn.feature_maps import FeatureMap


def forward(
    feature_map: FeatureMap,
    _bias: None,
    query: Tensor,  # (B, H, G, L, D)
    S: Tensor,  # (B, H, R, Dv)
    z: Tensor,  # (B, H, R)
    m: Tensor,  # (B, H, M)
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, H, G, L, Dv) in the query's dtype, the denominator and its exponent (B, H, G, L)."""
    batch, heads, groups, length, _ = query.shape
    out, den = query.new_empty(batch, heads, groups, length, S.shape[-1]), S.new_empty(batch, heads, groups, length)
    reference, space = torch.empty_like(den), Workspace(S)
    S, z = S.flatten(0, 1), z.flatten(0, 1)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=False)
    for start, stop in blocks(length, size):
        x, span = space.rows("x", query[..., start:stop, :]).flatten(2, 3), (groups, stop - start)
        phi_q, ref = query_features(query_block(feature_map, x, space), m, feature_map.exponential, over=True)
        phi_q = phi_q.flatten(0, 1)
        store_rows(out[..., start:stop, :], den[..., start:stop], space.product("num", phi_q, S), times_z(phi_q, z))
        reference[..., start:stop] = ref.unflatten(2, span)
    return out, den, reference


def times_z(phi_q: Tensor, z: Tensor) -> Tensor:
    """φ(q)·z, (B·H, n, 1); this way round it is a product of a row and a matrix, which runs several times as fast."""
    return torch.bmm(z.unsqueeze(-2), phi_q.mT).mT


def store_rows(out: Tensor, den: Tensor, num: Tensor, total: Tensor) -> None:
    """Write num/total into `out` and total into `den`, views of a block; a row that saw no key (total = 0) gives 0."""
    den.copy_(total.reshape(den.shape))
    total = total.masked_fill(total == 0, torch.inf).reshape(*den.shape, 1)
    if out.dtype == num.dtype:
        torch.div(num.view(out.shape), total, out=out)
    else:
        out.copy_(num.view(out.shape).div_(total))


def divide(num: Tensor, den: Tensor) -> Tensor:
    """num/den, (…, Dv) and (…, 1); a row that saw no key (den = 0) gives 0."""
    return num / den.masked_fill(den == 0, torch.inf)


def row_gradients(
    grad_out: Tensor, grad_den: Tensor, out: Tensor, den: Tensor, space: Workspace
) -> tuple[Tensor, Tensor]:
    """Gradients (…, Dv) and (…, 1) of the row's num and den, in units of the reference the row was normalised with."""
    # A denormal sum has no inverse within the dtype: its row passes no gradient on, instead of NaN to every key.
    dead = (den.abs() < torch.finfo(den.dtype).tiny).unsqueeze(-1)
    inverse = den.unsqueeze(-1).reciprocal().masked_fill_(dead, 0)
    grad_num = torch.mul(grad_out, inverse, out=space.buffer("grad_num", *out.shape))
    from_out = torch.mul(grad_num, out, out=space.buffer("from_out", *out.shape)).sum(-1, keepdim=True)
    return grad_num, torch.sub(grad_den.unsqueeze(-1).masked_fill(dead, 0), from_out)


def live_reference(den: Tensor, reference: Tensor) -> Tensor:
    """The rows' exponents, inf for rows that saw no key: their features become 0 instead of overflowing."""
    return reference.masked_fill(den == 0, torch.inf)


def backward(
    feature_map: FeatureMap,
    tensors: Sequence[Tensor],
    _bias: None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    bias_grad: bool,
) -> Gradients:
    """Gradients of (query, S, z)."""
    query, S, z, m = inputs
    batch, heads, groups, length, _ = query.shape
    grad_query, grad_S, grad_z = query.new_empty(query.shape), S.new_zeros(S.shape), z.new_zeros(z.shape)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=False)
    exponential, space, back = feature_map.exponential, Workspace(m), MapGradients(feature_map, tensors)
    S, z, flat_grad_S = S.flatten(0, 1), z.flatten(0, 1).unsqueeze(-2), grad_S.flatten(0, 1)
    for start, stop in blocks(length, size):
        x, out, grad_out = (
            space.rows(name, y[:, :, :, start:stop]).flatten(2, 3)
            for name, y in (("x", query), ("out", outputs[0]), ("grad_out", grads[0]))
        )
        den, reference, grad_den = (y[:, :, :, start:stop].flatten(2, 3) for y in (*outputs[1:], grads[1]))
        reference = live_reference(den, reference)
        t = query_block(feature_map, x, space)
        phi_q = normalised_query_features(t, m, reference, exponential, over=True)
        flat_phi = phi_q.flatten(0, 1)
        if outputs[0].dtype != m.dtype:
            # Rounded outputs would cost the gradient its digits where attention is nearly uniform.
            out = divide(flat_phi @ S, times_z(flat_phi, z.squeeze(-2))).view(out.shape)
        grad_num, grad_total = row_gradients(grad_out, grad_den, out, den, space)
        rows, totals = grad_num.flatten(0, 1), grad_total.flatten(0, 1)
        flat_grad_S.baddbmm_(flat_phi.mT, rows)
        grad_z.add_(torch.bmm(totals.mT, flat_phi).view(grad_z.shape))
        grad_phi = torch.bmm(rows, S.mT, out=space.buffer("grad", *flat_phi.shape)).addcmul_(totals, z)
        grad_t = query_gradient(grad_phi.view(phi_q.shape), phi_q, m, reference, exponential)
        grad_query[..., start:stop, :] = back.query(x, grad_t).unflatten(2, (groups, stop - start))
    return Gradients([grad_query, grad_S, grad_z], None, back.totals)
