"""Blocks in which an exponential map's maximum jumps: every row relative to keys it sees, so that no later key can
underflow it.

A block of P = 2ᵏ tokens is cut into rectangles: for h = P/2, …, 2, 1, rows of each second half of 2h tokens against the
keys of the first half, which all of them see; and each row against its own key. Rectangles of one size are one batch.
Letters as in blocked/__init__.py, E = Dv + 1 for [v, 1]; p rectangles per head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import power_
from linattn.attention.backends.blocked.features import Base, Keys
from linattn.attention.sums import Sums, lowest
from linattn.softmax.precision import LOG2_E


def safe_heads(keys: Keys, masked: Tensor | None, span: int, m: Tensor, c: Tensor, limit: float) -> Tensor | None:
    """(B, H): where c exceeds in no feature, by the limit, what the first row with a key sees; None: all.

    Each head decides for itself, so that its rounding does not depend on its neighbours.
    """
    if keys.base is None or keys.log is None or c is m:
        return None
    c, m = keys.base.units(c), keys.base.units(m)
    first = keys.log[..., 0, :]
    if span:
        first = m  # the first span sees no key of its own block
    elif masked is not None:
        index = (~masked).to(torch.uint8).argmax(-1)[..., None, None]
        first = torch.take_along_dim(keys.log, index, dim=-2).squeeze(-2)
        # Rows before it see the state alone, where that holds any key.
        first = torch.where(masked[..., :1] & (m > lowest(m.dtype)), m, first)
    safe = (c - torch.maximum(m, first)).amax(-1) < limit * LOG2_E
    return None if bool(safe.all()) else safe


class Level(NamedTuple):
    """Rectangles of one size: h rows against h keys, or (h = 0) each row against its own key."""

    half: int

    def rows(self, x: Tensor) -> Tensor:
        """A view (B, H, G, p, h, …) of the rectangles' rows of x (B, H, G, P, …)."""
        return torch.unflatten(x, 3, (-1, 2, self.half))[:, :, :, :, 1] if self.half else x.unsqueeze(4)

    def keys(self, x: Tensor) -> Tensor:
        """A view (B, H, p, h, …) of the rectangles' keys of x (B, H, P, …)."""
        return torch.unflatten(x, 2, (-1, 2, self.half))[:, :, :, 0] if self.half else x.unsqueeze(3)


def levels(length: int, span: int) -> Iterator[Level]:
    """The levels of a block of `length` = 2ᵏ tokens; rows that see earlier spans only have none below a span's."""
    if not span:
        yield Level(0)
    half = span or 1
    while half < length:
        yield Level(half)
        half *= 2


def _as_rectangles(x: Tensor) -> Tensor:
    """(B, H, G, p, h, …) -> (B, H, p, G·h, …): all query heads of a key head in one product."""
    return x.transpose(2, 3).flatten(3, 4)


def _as_rows(x: Tensor, groups: int) -> Tensor:
    """(B, H, p, G·h, …) -> (B, H, G, p, h, …)."""
    return torch.unflatten(x, 3, (groups, -1)).transpose(2, 3)


def _padded(x: Tensor, dim: int, filling: float = 0.0) -> Tensor:
    """x with its tokens padded to a power of two."""
    length, shape = x.shape[dim], list(x.shape)
    shape[dim] = (1 << (length - 1).bit_length()) - length
    return torch.cat((x, x.new_full(shape, filling)), dim)


class Split(NamedTuple):
    """A padded block of some heads, ready to be cut: B is 1, and H counts those of all texts.

    Sums and gradients beside it are of all heads. Exponents are of base 2 and relative to the base.
    """

    heads: Tensor  # their numbers among those of all texts, (H,)
    t: Tensor  # (B, H, G, P, R)
    log: Tensor  # (B, H, P, R)
    extended: Tensor  # (B, H, P, E)
    span: int
    base: Base

    def of(self, x: Tensor) -> Tensor:
        """Select these heads of x (B, H, …)."""
        return x.flatten(0, 1)[self.heads].unsqueeze(0)

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        """Add a part that is of these heads to a copy of x (B, H, …)."""
        return x.flatten(0, 1).index_add(0, self.heads, part.squeeze(0)).view(x.shape)

    def keys(self, level: Level) -> Keys:
        """The rectangles' keys, (B, H, p, h, ·)."""
        return Keys(level.keys(self.log), None)

    def query_features(self, t: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Features of queries relative to c, and their own exponent (…, n)."""
        shifted = t + c.unsqueeze(-2)
        reference = shifted.amax(-1, keepdim=True)
        return power_(shifted.sub_(reference)), reference.squeeze(-1)

    def repeated_query_features(self, t: Tensor, c: Tensor, reference: Tensor) -> Tensor:
        """Features of queries relative to c, given the exponents of rows."""
        return power_((t + c.unsqueeze(-2)).sub_(reference.unsqueeze(-1)))


def split(heads: Tensor, t: Tensor, keys: Keys, value: Tensor, groups: int, span: int) -> Split:
    """Pad a block of these heads: t (B, H, G·n, R), keys and values of n tokens; copies, so that buffers are free."""
    assert keys.log is not None
    assert keys.base is not None
    extended = torch.cat((value, value.new_ones(*value.shape[:-1], 1)), -1)
    rows, log, extended = (x.flatten(0, 1)[heads].unsqueeze(0) for x in (t, keys.log, extended))
    rows, log = _padded(rows.unflatten(2, (groups, -1)), 3), _padded(log, 2, -torch.inf)
    return Split(heads, rows, log, _padded(extended, 2), span, keys.base)


def split_rows(block: Split, length: int, before: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """Num (B, H, G·n, Dv) and den (…, 1) over the state and the block's past, and their exponents (B, H, G·n)."""
    groups, shape = block.t.shape[2], block.t.shape[2:4]
    phi_q, reference = block.query_features(block.t.flatten(2, 3), block.of(block.base.units(before.m)))
    rows = phi_q @ torch.cat((block.of(before.S), block.of(before.z).unsqueeze(-1)), -1)
    rows, reference = rows.unflatten(2, shape), reference.unflatten(2, shape).clone()
    for level in levels(shape[1], block.span):
        keys = block.keys(level)
        c = keys.own_peak()
        phi_q, ref = block.query_features(_as_rectangles(level.rows(block.t)), c)
        products = _as_rows(phi_q @ keys.relative_to(c).mT @ level.keys(block.extended), groups)
        ref, old = _as_rows(ref, groups), level.rows(reference)
        new, sums = torch.maximum(old, ref), level.rows(rows)
        sums.mul_(power_(old - new).unsqueeze(-1)).add_(products * power_(ref - new).unsqueeze(-1))
        old.copy_(new)
    rows, reference = (x[:, :, :, :length].flatten(2, 3) for x in (rows, reference))
    return rows[..., :-1], rows[..., -1:], reference * (1 / LOG2_E)


def split_gradients(
    block: Split, length: int, grad_num: Tensor, grad_den: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From gradients (B·H, G·n, Dv) and (…, 1) of num and den to those of t, keys and values, by a block alone."""
    groups, grad_rows = block.t.shape[2], torch.cat((grad_num, grad_den), -1)[block.heads].unsqueeze(0)
    grad_rows = _padded(grad_rows.unflatten(2, (groups, -1)), 3)
    # Padded rows read nothing: an infinite reference makes their features 0.
    reference = _padded((block.of(reference) * LOG2_E).unflatten(2, (groups, -1)), 3, torch.inf)
    grad_t, grad_extended = torch.zeros_like(block.t), torch.zeros_like(block.extended)
    grad_log = torch.zeros_like(block.log)
    for level in levels(block.t.shape[3], block.span):
        keys, rows = block.keys(level), _as_rectangles(level.rows(grad_rows))
        c, ref = keys.own_peak(), _as_rectangles(level.rows(reference))
        phi_q = block.repeated_query_features(_as_rectangles(level.rows(block.t)), c, ref)
        phi_k, extended = keys.relative_to(c), level.keys(block.extended)
        grad_scores = rows @ extended.mT
        level.rows(grad_t).add_(_as_rows((grad_scores @ phi_k).mul_(phi_q), groups))
        level.keys(grad_log).add_((grad_scores.mT @ phi_q).mul_(phi_k))
        level.keys(grad_extended).add_((phi_q @ phi_k.mT).mT @ rows)
    return grad_t[:, :, :, :length].flatten(2, 3), grad_log[:, :, :length], grad_extended[:, :, :length, :-1]
