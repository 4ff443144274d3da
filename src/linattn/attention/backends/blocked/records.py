"""Records of the folds' tensors, and blocks of rows as they are stored; letters as in blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import Workspace
from linattn.attention.sums import Sums


class Absorb(NamedTuple):
    """Keys, and the sums before them."""

    key: Tensor  # (B, H, L, D)
    value: Tensor  # (B, H, L, Dv)
    S: Tensor  # (B, H, R, Dv)
    z: Tensor  # (B, H, R)
    m: Tensor  # (B, H, M)
    bias: Tensor | None = None  # (B, H or 1, L)


class Read(NamedTuple):
    """Queries, and the sums they read."""

    query: Tensor  # (B, H, G, L, D)
    S: Tensor
    z: Tensor
    m: Tensor


class Causal(NamedTuple):
    """Inputs of the causal fold: as many queries as keys, and the sums before them."""

    query: Tensor
    key: Tensor
    value: Tensor
    S: Tensor
    z: Tensor
    m: Tensor
    bias: Tensor | None = None


class CausalOutputs(NamedTuple):
    """Rows, the sums after the last token, and those before segments of blocks, for the backward pass."""

    out: Tensor  # (B, H, G, L, Dv)
    den: Tensor  # (B, H, G, L)
    reference: Tensor  # (B, H, G, L)
    S: Tensor
    z: Tensor
    m: Tensor
    S_kept: Tensor  # (B, K, H, R, Dv)
    z_kept: Tensor  # (B, K, H, R)
    m_kept: Tensor  # (B, K, H, M)

    def kept(self, index: int) -> Sums:
        """The sums before a segment but the first."""
        return Sums(self.S_kept[:, index - 1], self.z_kept[:, index - 1], self.m_kept[:, index - 1])


def sums_of(inputs: Absorb | Read | Causal) -> Sums:
    """The sums a fold is given."""
    return Sums(inputs.S, inputs.z, inputs.m)


def empty_sums(inputs: Absorb | Causal) -> Sums:
    """Memory for the sums after a fold."""
    return Sums(*(x.new_empty(x.shape) for x in (inputs.S, inputs.z, inputs.m)))


class Saved(NamedTuple):
    """Input of a backward pass: a forward pass, and the gradients of its outputs in their own record."""

    inputs: Any
    outputs: Any
    grads: Any
    tensors: Sequence[Tensor]  # those of the map that gradients follow
    bias_grad: bool  # whether the biases' gradient is wanted


class KeyGradients(NamedTuple):
    """Gradients of what a map returns for a block of keys."""

    features: Tensor  # of the exponents of an exponential map, else of the linear features
    weight: Tensor | None = None  # of the logarithmic weights, where the keys have any

    @property
    def log(self) -> Tensor:
        """Gradient of the keys' exponents, which biases are added to."""
        return self.features if self.weight is None else self.weight


class Gradients(NamedTuple):
    """Output of a backward pass."""

    inputs: Sequence[Tensor]  # in the order of the inputs' record, without m and the biases
    bias: Tensor | None  # None where none is wanted
    tensors: list[Tensor]  # of the map's, in at least float32


class SavedRows(NamedTuple):
    """A block of rows as the forward pass left them, and the gradients of its outputs."""

    x: Tensor  # the queries, (B, H, G·n, D)
    out: Tensor | None  # (B, H, G·n, Dv), None where only a rounded one was kept
    den: Tensor  # (B, H, G·n)
    reference: Tensor  # (B, H, G·n)
    grad_out: Tensor  # (B, H, G·n, Dv)
    grad_den: Tensor  # (B, H, G·n)

    def gradients(self, sums: Callable[[], tuple[Tensor, Tensor]], space: Workspace) -> tuple[Tensor, Tensor]:
        """The gradients (B·H, G·n, Dv) and (B·H, G·n, 1) of num and den, which `sums` recomputes where needed."""
        out, den = self.out, self.den.unsqueeze(-1)
        if out is None:
            num, total = sums()
            out = (num / total.masked_fill(total == 0, torch.inf)).view(self.grad_out.shape)
        # A row that saw no key passes no gradient on.
        dead = den == 0
        inverse = den.reciprocal().masked_fill_(dead, 0)
        # out = num/den: grad num = grad out/den, grad den = grad den - grad num·out.
        grad_num = torch.mul(self.grad_out, inverse, out=space.buffer("grad_num", *out.shape))
        from_out = torch.mul(grad_num, out, out=space.buffer("from_out", *out.shape)).sum(-1, keepdim=True)
        grad_den = torch.sub(self.grad_den.unsqueeze(-1).masked_fill(dead, 0), from_out)
        return grad_num.flatten(0, 1), grad_den.flatten(0, 1)


def saved_rows(saved: Saved, block: slice, x: Tensor, space: Workspace) -> SavedRows:
    """A block's rows, from outputs and gradients that begin as Rows do."""
    outs = {"out": saved.outputs.out, "grad_out": saved.grads.out}
    out, grad_out = (space.rows(name, y[..., block, :]).flatten(2, 3) for name, y in outs.items())
    rows = (saved.outputs.den, saved.outputs.reference, saved.grads.den)
    den, reference, grad_den = (x[..., block].flatten(2, 3) for x in rows)
    # Rounded outputs would cost the gradient its digits where attention is nearly uniform.
    saved_out = out if saved.outputs.out.dtype == den.dtype else None
    # An infinite exponent makes the features of rows that saw no key 0 instead of overflowing.
    return SavedRows(x, saved_out, den, reference.masked_fill(den == 0, torch.inf), grad_out, grad_den)


def empty_rows(query: Tensor, S: Tensor) -> Rows:
    """Memory for the rows of queries (B, H, G, L, D)."""
    den = S.new_empty(query.shape[:-1])
    return Rows(query.new_empty(*query.shape[:-1], S.shape[-1]), den, torch.empty_like(den))


def store_rows(rows: Rows, block: slice, num: Tensor, total: Tensor, reference: Tensor | None) -> None:
    """Write a block's num/total, total and exponents, None for 0; a row that saw no key (total = 0) gives 0."""
    out, den, exponent = rows.out[..., block, :], rows.den[..., block], rows.reference[..., block]
    total = total.reshape(*den.shape, 1)
    den.copy_(total.squeeze(-1))
    if reference is None:
        exponent.zero_()
    else:
        exponent.copy_(reference.reshape(den.shape))
        total = total.masked_fill(total == 0, torch.inf)
    if out.dtype == num.dtype:
        torch.div(num.view(out.shape), total, out=out)
    else:
        out.copy_(num.view(out.shape).div_(total))


def times_z(phi_q: Tensor, z: Tensor) -> Tensor:
    """φ(q)·z, (B·H, n, 1); this way round it is a product of a row and a matrix, which runs several times as fast."""
    return torch.bmm(z.unsqueeze(-2), phi_q.mT).mT
