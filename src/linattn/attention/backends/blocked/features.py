"""One block of tokens as features, and the way back through the map; letters as in blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import RISE, Workspace, coarse, exponential_, is_seen, power_
from linattn.attention.backends.blocked.records import Absorb, Causal, KeyGradients
from linattn.attention.sums import lowest
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.softmax.precision import LOG2_E

# Sums of a block's features up to which they stay relative to the sums' exponent, and denominators for which rows have
# an exponent of 0: to find the largest exponents and to shift by them are passes over all features.
_MOST, _DENOMINATORS = 2.0**30, (2.0**-30, 2.0**40)
# Exponents of sums up to which features are relative to them: a difference has the digits of its larger part.
_NEAR = 64.0


class Keys(NamedTuple):
    """A block of keys: φ(k) = linear · exp(log), or 2^(log + base) of an exponential map; None stands for 1."""

    log: Tensor | None  # (B, H, n, M), -inf where masked; of an exponential map an exponent of base 2
    linear: Tensor | None  # (B, H, n, R), or (B, H, n, F) for grouped maps
    product: Tensor | None = None  # (B, H, n, R), written over: a grouped map's features
    base: Base | None = None  # of an exponential map
    phi: Tensor | None = None  # its features relative to the base, where they may stay so: log is None then
    total: Tensor | None = None  # the sums of these, (B, H, R)
    exceeds: Tensor | None = None  # where sums exceed what may stay, (B, H, R), if they were looked at

    def peak(self, m: Tensor) -> Tensor:
        """The exponent (B, H, M) of sums after these keys: their running maximum, or m itself where that is near."""
        if self.log is None:
            return m.clamp(min=0) if self.base is None else self.base.m
        peak = self.log.amax(-2)
        return torch.maximum(m, peak) if self.base is None else self.base.moved(peak, self.exceeds)

    def least(self, c: Tensor) -> Tensor:
        """How far below c (B, H, R) the smallest of an exponential map's exponents is, in each head (B, H)."""
        if self.phi is not None:
            return self.phi.amin((-2, -1)).log()
        assert self.log is not None
        assert self.base is not None
        return (self.log.amin(-2) - self.base.units(c)).amin(-1) * (1 / LOG2_E)

    def own_peak(self) -> Tensor:
        """Maximum of these keys alone (…, M), finite even where all are masked."""
        assert self.log is not None
        return self.log.amax(-2).clamp(min=lowest(self.log.dtype))

    def relative_to(self, c: Tensor) -> Tensor:
        """φ(k)·exp(-c), (B, H, n, R): at most 1 for exponential maps when c is at or above these keys' maximum."""
        if self.log is None:
            assert self.linear is not None
            # The exponent is 0 unless the state holds keys of other biases; a pass over the features is spared.
            return self.linear if bool((c == 0).all()) else self.linear * exponential_(-c).unsqueeze(-2)
        if self.linear is None:
            return power_(self.log - c.unsqueeze(-2))
        weight = exponential_(self.log - c.unsqueeze(-2))
        if self.product is not None:
            groups = self.product.unflatten(-1, (weight.shape[-1], -1))
            torch.mul(weight.unsqueeze(-1), self.linear.unsqueeze(-2), out=groups)
            return self.product
        return self.linear * weight

    def turned_relative_to(self, c: Tensor) -> Tensor:
        """φ(k)·exp(-c) of sums' exponent c, written over an exponential map's exponents, which nothing needs later."""
        if self.phi is not None:
            return self.phi
        if self.base is None or self.log is None:
            return self.relative_to(c)
        is_relative = c is self.base.m and self.base.is_near
        return power_(self.log if is_relative else self.log.sub_(self.base.units(c).unsqueeze(-2)))

    def gradients(self, c: Tensor, phi_k: Tensor, grad_phi: Tensor) -> KeyGradients:
        """From the gradient of φ(k)·exp(-c), which may be written over, to the map's; c is a constant."""
        if self.linear is None:
            return KeyGradients(grad_phi.mul_(phi_k))
        if self.log is None:
            return KeyGradients(grad_phi if bool((c == 0).all()) else grad_phi * exponential_(-c).unsqueeze(-2))
        if self.product is not None:
            groups, weight = grad_phi.unflatten(-1, (c.shape[-1], -1)), exponential_(self.log - c.unsqueeze(-2))
            of_linear = (weight.unsqueeze(-2) @ groups).squeeze(-2)
            return KeyGradients(of_linear, (groups * phi_k.unflatten(-1, groups.shape[-2:])).sum(-1))
        return KeyGradients(grad_phi * exponential_(self.log - c.unsqueeze(-2)), (grad_phi * phi_k).sum(-1))


class Base(NamedTuple):
    """An exponent of sums, which features are relative to, and as an exponential map's exponents take it."""

    m: Tensor  # of the sums, (B, H, R)
    power: Tensor  # the same of base 2, (B, H, 1, R)
    start: Tensor  # less the same, 0 where it is far from 0 or there is no key
    near: Tensor  # heads in which it is nowhere far, (B, H, 1)
    is_near: bool  # whether all are, as far as they may be looked at

    @classmethod
    def of(cls, m: Tensor) -> Base:
        """Make the base of sums of exponents m (B, H, M)."""
        power, is_far = (m * LOG2_E).unsqueeze(-2), m.abs() > _NEAR
        near = ~is_far.any(-1, keepdim=True)
        return cls(m, power, -power.masked_fill(is_far.unsqueeze(-2), 0), near, is_seen(m) and bool(near.all()))

    def units(self, exponent: Tensor) -> Tensor:
        """An exponent (B, H, R) of sums, of base 2 and relative."""
        return exponent * LOG2_E + self.start.squeeze(-2)

    def moved(self, peak: Tensor, exceeds: Tensor | None) -> Tensor:
        """The exponents after keys with these largest ones, coarse where they move."""
        if exceeds is None:
            exceeds = peak - self.units(self.m) > RISE * LOG2_E
        return torch.where(exceeds, coarse((peak - self.start.squeeze(-2)) * (1 / LOG2_E)), self.m)


class KeyBlocks:
    """A fold's keys, values and biases, block by block in the accumulation dtype; masked keys and values are 0."""

    def __init__(self, feature_map: FeatureMap, inputs: Absorb | Causal, space: Workspace) -> None:
        self._map, self._inputs, self._space = feature_map, inputs, space
        # What masked keys hold, which may be NaN, must not enter any product.
        masked = None if inputs.bias is None else inputs.bias == -torch.inf
        # Looked for once: biases that mask nothing, as a gate's, cost no pass over keys and values.
        self._masked = masked if masked is not None and bool(masked.any()) else None
        # Whether there are any but those.
        self.has_biases = masked is not None and bool((~masked & (inputs.bias != 0)).any())
        self._base: Base | None = None

    def bias(self, block: slice) -> Tensor | None:
        """(B, H or 1, n)."""
        return None if self._inputs.bias is None else self._inputs.bias[..., block]

    def masked(self, block: slice) -> Tensor | None:
        """(B, H or 1, n) bool; None where the call masks no key at all."""
        return None if self._masked is None else self._masked[..., block]

    def base(self, m: Tensor) -> Base:
        """The base of sums of these exponents, made once where they stay."""
        if self._base is None or self._base.m is not m:
            self._base = Base.of(m)
        return self._base

    def tokens(self, block: slice, slot: str = "") -> Tensor:
        """The keys (B, H, n, D); a slot is a buffer of their own."""
        return self._space.rows(f"{slot}k", self._inputs.key[:, :, block], self.masked(block))

    def values(self, block: slice) -> Tensor:
        """(B, H, n, Dv)."""
        return self._space.rows("v", self._inputs.value[:, :, block], self.masked(block))

    def features(
        self, block: slice, m: Tensor, x: Tensor | None = None, slot: str = "", bias: Tensor | None = None
    ) -> Keys:
        """Their features times exp(bias), beside sums of exponents m; x are the keys, where they are loaded.

        Other biases (B, H, n) may stand in the place of the call's, of exponential maps.
        """
        x, bias = self.tokens(block) if x is None else x, self.bias(block) if bias is None else bias
        out = self._space.buffer(f"{slot}keys", *x.shape[:-1], self._map.num_features)
        rise = None if bias is None else bias.unsqueeze(-1)
        if isinstance(self._map, GroupedFeatureMap):
            log = self._map.key_log_weight(x)
            return Keys(log if rise is None else log + rise, self._map.key(x), out)
        if self._map.exponential:
            base, rows, exceeds = self.base(m), None if rise is None else rise * LOG2_E, None
            if base.is_near:
                phi = power_(self._map.write_key_powers(x, out, rows, base.start))
                total = phi.sum(-2)
                if not total.numel() or float(total.amax()) <= _MOST:
                    return Keys(None, None, None, base, phi, total)
                exceeds = ~(total <= _MOST)
            log = self._map.write_key_powers(x, out, rows, base.start)
            return Keys(log, None, base=base, exceeds=exceeds)
        features, weight = self._map.write_key(x, out), self._map.key_log_weight(x)
        if weight is None:
            return Keys(rise, features)
        log = weight.unsqueeze(-1).to(m.dtype)
        return Keys(log if rise is None else log + rise, features)

    def linear_features(self, block: slice, x: Tensor | None = None, slot: str = "") -> tuple[Keys, Tensor | None]:
        """Of a map that is not exponential: its features, and beside them weights and biases (B, H or 1, n)."""
        x, bias = self.tokens(block) if x is None else x, self.bias(block)
        if self._masked is None and not self.has_biases:
            bias = None
        out = self._space.buffer(f"{slot}keys", *x.shape[:-1], self._map.num_features)
        features, weight = self._map.write_key(x, out), self._map.key_log_weight(x)
        if weight is None:
            return Keys(None, features), bias
        return Keys(None, features), weight.to(x.dtype) if bias is None else weight + bias


def query_rows(query: Tensor, block: slice, space: Workspace) -> Tensor:
    """A block (B, H, G·n, D) of queries (B, H, G, L, D) in the accumulation dtype."""
    return space.rows("q", query[..., block, :]).flatten(2, 3)


def query_block(feature_map: FeatureMap, x: Tensor, space: Workspace, power: Tensor) -> Tensor:
    """Features of queries x (B, H, n, D), or exponents of base 2 plus `power` (B, H, 1, R)."""
    out = space.buffer("queries", *x.shape[:-1], feature_map.num_features)
    if feature_map.exponential:
        return feature_map.write_query_powers(x, out, None, power)
    return feature_map.write_query(x, out)


def read_queries(
    feature_map: FeatureMap, x: Tensor, c: Base, space: Workspace, sums: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Num (B·H, n, Dv), den (B·H, n, 1) and exponent (B, H, n) of queries (B, H, n, D); None where 0 and no den is."""
    # The sums are functions of features (B·H, n, R) relative to c.
    out, near = space.buffer("queries", *x.shape[:-1], feature_map.num_features), None
    if not feature_map.exponential:
        return *sums(feature_map.write_query(x, out).flatten(0, 1)), c.m.expand(x.shape[:-1])
    t = feature_map.write_query_powers(x, out, None, c.power)
    if is_seen(t) and (c.is_near or bool(c.near.any())):  # far from 0 no denominator is in range
        num, den = sums(power_(t).flatten(0, 1))
        least, most = _DENOMINATORS
        fits = not den.numel() or (least <= (extremes := den.aminmax()).min.item() and extremes.max.item() <= most)
        if fits and c.is_near:
            return num, den, None
        near = ((den >= least) & (den <= most)).view(t.shape[:-1]) & c.near
        t = feature_map.write_query_powers(x, out, None, c.power)
    reference = t.amax(-1).mul_(1 / LOG2_E)
    reference = reference if near is None else reference.masked_fill_(near, 0)
    return *sums(power_(t.sub_((reference * LOG2_E).unsqueeze(-1))).flatten(0, 1)), reference


def repeated_query_features(feature_map: FeatureMap, x: Tensor, c: Base, reference: Tensor, space: Workspace) -> Tensor:
    """Features of queries relative to c, given the exponents (B, H, n) of rows; infinite ones make features 0."""
    t = query_block(feature_map, x, space, c.power)
    if not feature_map.exponential:
        return t * exponential_(c.m.unsqueeze(-2) - reference.unsqueeze(-1))
    # As the rows' denominators were made, to the bit: shifted where they were.
    if not is_seen(t) or bool(reference.any()):
        t.sub_((reference * LOG2_E).unsqueeze(-1))
    return power_(t)


def query_gradient(grad_phi: Tensor, phi_q: Tensor, c: Tensor, reference: Tensor, exponential: bool) -> Tensor:
    """From the gradient of the normalised features to that of what `query` returned, written over it."""
    if exponential:
        return grad_phi.mul_(phi_q)
    return grad_phi.mul_(exponential_(c.unsqueeze(-2) - reference.unsqueeze(-1)))


class BiasGradient:
    """The gradient of the keys' biases (B, H or 1, L), head by head and block by block; None where none is wanted."""

    def __init__(self, bias: Tensor | None, num_heads: int, *, wanted: bool) -> None:
        self._is_shared = bias is not None and bias.shape[1] == 1
        # (B, H, L)
        self.of_heads = bias.new_zeros(bias.shape[0], num_heads, bias.shape[2]) if wanted and bias is not None else None

    @property
    def total(self) -> Tensor | None:
        """Gradient of the biases as they were given."""
        if self.of_heads is None:
            return None
        return self.of_heads.sum(1, keepdim=True) if self._is_shared else self.of_heads

    def store(self, block: slice, masked: Tensor | None, of_log: Tensor) -> None:
        """Store the gradient of a block, from that of its keys' exponents (B, H, n) or (B, H, n, M)."""
        if self.of_heads is None:
            return
        if of_log.ndim > self.of_heads.ndim:
            of_log = of_log.sum(-1)
        self.of_heads[..., block] = of_log if masked is None else of_log.masked_fill(masked, 0)


def store(target: Tensor, masked: Tensor | None, grad: Tensor) -> None:
    """Write a block of gradients (B, H, n, D), of queries (B, H, G·n, D) to (B, H, G, n, D); masked keys get 0."""
    target.copy_((grad if masked is None else grad.masked_fill(masked.unsqueeze(-1), 0)).view(target.shape))
