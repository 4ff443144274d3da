"""Read a state with queries: out = φ(q)ᵀS / φ(q)ᵀz, block by block; letters as in blocks.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.attention._blocked.blocks import (
    Workspace,
    block_size,
    blocks,
    new_totals,
    normalised_query_features,
    parted,
    pulled_back,
    query_block,
    query_features,
    traced,
)
from linattn.feature_maps import FeatureMap


def divide(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[num, den] (..., E) -> num/den and den; a row that saw no key (den = 0) gives 0."""
    den = rows[..., -1]
    return rows[..., :-1] / den.masked_fill(den == 0, torch.inf).unsqueeze(-1), den


def row_gradients(grad_out: Tensor, grad_den: Tensor, out: Tensor, den: Tensor) -> Tensor:
    """The gradient (..., E) of the row's sums [num, den], in units of the reference the row was normalised with."""
    inverse = den.reciprocal().masked_fill_(den == 0, 0).unsqueeze(-1)
    grad_out = grad_out.to(den.dtype) * inverse
    from_den = torch.where(den == 0, 0, grad_den).unsqueeze(-1)
    return torch.cat((grad_out, from_den - (grad_out * out).sum(-1, keepdim=True)), -1)


def live_reference(den: Tensor, reference: Tensor) -> Tensor:
    """The rows' exponents, inf for rows that saw no key: their features become 0 instead of overflowing."""
    return reference.masked_fill(den == 0, torch.inf)


def forward(
    feature_map: FeatureMap,
    _mask: None,
    query: Tensor,  # (B, H, G, L, D)
    moments: Tensor,  # (B, H, R, E)
    m: Tensor,  # (B, H, M)
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, H, G, L, Dv) in the query's dtype, the denominator and its exponent (B, H, G, L)."""
    batch, heads, groups, length, _ = query.shape
    out = query.new_empty(batch, heads, groups, length, moments.shape[-1] - 1)
    den = moments.new_empty(batch, heads, groups, length)
    reference, space, (S, z) = torch.empty_like(den), Workspace(moments), parted(moments)
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=False)
    for start, stop in blocks(length, size):
        x, span = space.rows("x", query[..., start:stop, :], None).flatten(2, 3), (groups, stop - start)
        phi_q, ref = query_features(query_block(feature_map, x, space), m, feature_map.exponential, over=True)
        phi_q = phi_q.flatten(0, 1)
        num = torch.bmm(phi_q, S, out=space.buffer("num", *phi_q.shape[:2], S.shape[-1]))
        store_rows(out[..., start:stop, :], den[..., start:stop], num, (z.mT @ phi_q.mT).mT)
        reference[..., start:stop] = ref.unflatten(2, span)
    return out, den, reference


def store_rows(out: Tensor, den: Tensor, num: Tensor, total: Tensor) -> None:
    """Write num/total into `out` and total into `den`, views of a block; a row that saw no key (total = 0) gives 0."""
    den.copy_(total.reshape(den.shape))
    total = total.masked_fill(total == 0, torch.inf).reshape(*den.shape, 1)
    if out.dtype == num.dtype:
        torch.div(num.view(out.shape), total, out=out)
    else:
        out.copy_(num.view(out.shape).div_(total))


def backward(
    feature_map: FeatureMap,
    tensors: Sequence[Tensor],
    _mask: None,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of (query, moments) and of the map's tensors."""
    query, moments, m = inputs
    batch, heads, groups, length, _ = query.shape
    grad_query, grad_moments, totals = (
        query.new_empty(query.shape),
        moments.new_zeros(moments.shape),
        new_totals(tensors),
    )
    size = block_size(batch * heads * groups, feature_map.num_features, query.device, is_causal=False)
    exponential, space = feature_map.exponential, Workspace(m)
    for start, stop in blocks(length, size):
        x, out, den, reference, grad_out, grad_den = (
            y[:, :, :, start:stop].flatten(2, 3) for y in (query, *outputs, *grads[:2])
        )
        leaf, (t,) = traced(lambda x: (feature_map.query(x),), x.to(m.dtype))
        reference = live_reference(den, reference)
        shape = (*x.shape[:-1], feature_map.num_features)
        phi_q = normalised_query_features(t.detach(), m, reference, exponential, space.buffer("phi", *shape))
        if out.dtype != m.dtype:
            # Rounded outputs would cost the gradient its digits where attention is nearly uniform.
            out = divide(phi_q @ moments)[0]
        rows = row_gradients(grad_out, grad_den, out, den)
        grad_moments.flatten(0, 1).baddbmm_(phi_q.flatten(0, 1).mT, rows.flatten(0, 1))
        grad_phi = torch.matmul(rows, moments.mT, out=space.buffer("grad", *shape))
        grad_t = query_gradient(grad_phi, phi_q, m, reference, exponential)
        grad_x = pulled_back(leaf, (t,), (grad_t,), tensors, totals)
        grad_query[..., start:stop, :] = grad_x.unflatten(2, (groups, stop - start))
    return [grad_query, grad_moments], totals


def query_gradient(grad_phi: Tensor, phi_q: Tensor, c: Tensor, reference: Tensor, exponential: bool) -> Tensor:
    """From the gradient of the normalised features to that of what `query` returned, written over it."""
    if exponential:
        return grad_phi.mul_(phi_q)
    return grad_phi.mul_((c.unsqueeze(-2) - reference.unsqueeze(-1)).exp_())
