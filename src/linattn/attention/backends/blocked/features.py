"""One block of tokens as features, and the way back through the map; letters as in blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Workspace, exponential_, is_masked
from linattn.attention.backends.blocked.records import Absorb, Causal, KeyGradients
from linattn.attention.sums import lowest
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.softmax.precision import accumulation_dtype


class Keys(NamedTuple):
    """A block of keys: φ(k) = linear · exp(log), where None stands for 1."""

    log: Tensor | None  # (B, H, n, M), -inf where masked
    linear: Tensor | None  # (B, H, n, R), or (B, H, n, F) for grouped maps
    product: Tensor | None = None  # (B, H, n, R), written over: a grouped map's features

    def peak(self, m: Tensor) -> Tensor:
        """The running maximum (B, H, M) after these keys."""
        return m.clamp(min=0) if self.log is None else torch.maximum(m, self.log.amax(-2))

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
        weight = exponential_(self.log - c.unsqueeze(-2))
        if self.product is not None:
            assert self.linear is not None
            groups = self.product.unflatten(-1, (weight.shape[-1], -1))
            torch.mul(weight.unsqueeze(-1), self.linear.unsqueeze(-2), out=groups)
            return self.product
        return weight if self.linear is None else self.linear * weight

    def turned_relative_to(self, c: Tensor) -> Tensor:
        """`relative_to`, written over the exponents of an exponential map: for the pass that needs them no more."""
        if self.linear is not None or self.log is None:
            return self.relative_to(c)
        return exponential_(self.log.sub_(c.unsqueeze(-2)))

    def gradients(self, c: Tensor, phi_k: Tensor, grad_phi: Tensor) -> KeyGradients:
        """From the gradient of φ(k)·exp(-c), which may be written over, to the map's; c is a constant."""
        if self.linear is None:
            return KeyGradients(grad_phi.mul_(phi_k))
        if self.log is None:
            return KeyGradients(grad_phi if bool((c == 0).all()) else grad_phi * exponential_(-c).unsqueeze(-2))
        if self.product is not None:
            groups, weight = grad_phi.unflatten(-1, (c.shape[-1], -1)), (self.log - c.unsqueeze(-2)).exp_()
            of_linear = (weight.unsqueeze(-2) @ groups).squeeze(-2)
            return KeyGradients(of_linear, (groups * phi_k.unflatten(-1, groups.shape[-2:])).sum(-1))
        return KeyGradients(grad_phi * (self.log - c.unsqueeze(-2)).exp_(), (grad_phi * phi_k).sum(-1))


class KeyBlocks:
    """A fold's keys, values and biases, block by block in the accumulation dtype; masked keys and values are 0."""

    def __init__(self, feature_map: FeatureMap, inputs: Absorb | Causal, space: Workspace) -> None:
        self._map, self._inputs, self._space = feature_map, inputs, space
        masked = None if inputs.bias is None else is_masked(inputs.bias)
        # Looked for once: biases that mask nothing, as a gate's, cost no pass over keys and values.
        self._masked = masked if masked is not None and bool(masked.any()) else None

    def bias(self, block: slice) -> Tensor | None:
        """(B, H or 1, n)."""
        return None if self._inputs.bias is None else self._inputs.bias[..., block]

    def masked(self, block: slice) -> Tensor | None:
        """(B, H or 1, n) bool; None where the call masks no key at all."""
        return None if self._masked is None else self._masked[..., block]

    def tokens(self, block: slice, slot: str = "") -> Tensor:
        """The keys (B, H, n, D); a slot is a buffer of their own."""
        return self._space.rows(f"{slot}k", self._inputs.key[:, :, block], self.masked(block))

    def values(self, block: slice) -> Tensor:
        """(B, H, n, Dv)."""
        return self._space.rows("v", self._inputs.value[:, :, block], self.masked(block))

    def features(self, block: slice, x: Tensor | None = None, slot: str = "") -> Keys:
        """Their features times exp(bias); x are the keys, where they are loaded."""
        x, bias = self.tokens(block) if x is None else x, self.bias(block)
        out = self._space.buffer(f"{slot}keys", *x.shape[:-1], self._map.num_features)
        rise = None if bias is None else bias.unsqueeze(-1)
        if isinstance(self._map, GroupedFeatureMap):
            log = self._map.key_log_weight(x)
            return Keys(log if rise is None else log + rise, self._map.key(x), out)
        features = self._map.write_key(x, out)
        if self._map.exponential:
            return Keys(features if rise is None else features.add_(rise), None)
        weight = self._map.key_log_weight(x)
        if weight is None:
            return Keys(rise, features)
        log = weight.unsqueeze(-1)
        return Keys(log if rise is None else log + rise, features)


def query_rows(query: Tensor, block: slice, space: Workspace) -> Tensor:
    """A block (B, H, G·n, D) of queries (B, H, G, L, D) in the accumulation dtype."""
    return space.rows("q", query[..., block, :]).flatten(2, 3)


def query_block(feature_map: FeatureMap, x: Tensor, space: Workspace) -> Tensor:
    """Features or exponents of queries x (B, H, n, D), to be written over."""
    return feature_map.write_query(x, space.buffer("queries", *x.shape[:-1], feature_map.num_features))


def query_features(t: Tensor, c: Tensor, exponential: bool, *, over: bool = False) -> tuple[Tensor, Tensor]:
    """Features of queries relative to c, and their own exponent (B, H, n); `over` writes over t."""
    if not exponential:
        return t, c.expand(t.shape[:-1])
    shifted = t.add_(c.unsqueeze(-2)) if over else t + c.unsqueeze(-2)
    reference = shifted.amax(-1, keepdim=True)
    return exponential_(shifted.sub_(reference)), reference.squeeze(-1)


def normalised_query_features(
    t: Tensor, c: Tensor, reference: Tensor, exponential: bool, *, over: bool = False
) -> Tensor:
    """`query_features` relative to a row reference (B, H, n) that is already known; `over` writes over t."""
    if not exponential:
        return t * (c.unsqueeze(-2) - reference.unsqueeze(-1)).exp_()
    shifted = t.add_(c.unsqueeze(-2)) if over else t + c.unsqueeze(-2)
    return exponential_(shifted.sub_(reference.unsqueeze(-1)))


def query_gradient(grad_phi: Tensor, phi_q: Tensor, c: Tensor, reference: Tensor, exponential: bool) -> Tensor:
    """From the gradient of the normalised features to that of what `query` returned, written over it."""
    if exponential:
        return grad_phi.mul_(phi_q)
    return grad_phi.mul_((c.unsqueeze(-2) - reference.unsqueeze(-1)).exp_())


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


def store_queries(target: Tensor, grad: Tensor) -> None:
    """Write a block of gradients (B, H, G·n, D) to (B, H, G, n, D)."""
    target.copy_(grad.view(target.shape))


def store_masked(target: Tensor, masked: Tensor | None, grad: Tensor) -> None:
    """Write a block of gradients; masked keys get exactly 0."""
    target.copy_(grad if masked is None else grad.masked_fill(masked.unsqueeze(-1), 0))


class _Waiting(NamedTuple):
    """A block whose gradient is to be found together with others'."""

    x: Tensor  # (B, H, n, D)
    grads: list[Tensor]  # (B, H, n, …)
    store: Callable[[Tensor], None]


class MapGradients:
    """From gradients of a map's outputs to those of its inputs, and to those of its followed tensors.

    Where autograd has to find them, blocks wait until there are so many at once: a graph for each costs more than its
    arithmetic. `finish` ends the wait.
    """

    def __init__(self, feature_map: FeatureMap, tensors: Sequence[Tensor], *, at_once: int = 1) -> None:
        self._map, self._tensors, self._at_once = feature_map, tensors, at_once
        self._queries, self._keys = list[_Waiting](), list[_Waiting]()
        # Summed over blocks in at least float32.
        self._totals = [torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in tensors]

    def query(self, x: Tensor, grad: Tensor, store: Callable[[Tensor], None]) -> None:
        """Have the gradient of queries x (B, H, n, D) stored."""
        if self._tensors:
            self._wait(x, [grad], store, self._queries)
        else:
            store(self._map.query_vjp(x, grad))

    def key(self, x: Tensor, grads: KeyGradients, store: Callable[[Tensor], None]) -> None:
        """Have the gradient of keys x (B, H, n, D) stored."""
        if self._tensors or grads.weight is not None:
            self._wait(x, [grad for grad in grads if grad is not None], store, self._keys)
        else:
            store(self._map.key_vjp(x, grads.features))

    def finish(self) -> list[Tensor]:
        """Store what waits, and give the gradients of the followed tensors."""
        for waiting in (self._queries, self._keys):
            if waiting:
                self._follow(waiting)
        return self._totals

    def _wait(self, x: Tensor, grads: list[Tensor], store: Callable[[Tensor], None], waiting: list[_Waiting]) -> None:
        """Copies, since the next block is written over this one."""
        waiting.append(_Waiting(x.clone(), [grad.clone() for grad in grads], store))
        if len(waiting) == self._at_once:
            self._follow(waiting)

    def _follow(self, waiting: list[_Waiting]) -> None:
        """By autograd, with one graph for all that wait."""
        with torch.enable_grad():
            leaf = torch.cat([block.x for block in waiting], 2).requires_grad_()
            is_key = waiting is self._keys
            outputs = [self._map.key(leaf) if is_key else self._map.query(leaf)]
            weight = self._map.key_log_weight(leaf) if is_key and not self._map.exponential else None
            outputs += [] if weight is None else [weight]
        grads = [torch.cat(parts, 2) for parts in zip(*(block.grads for block in waiting), strict=True)]
        gradient = self.pull(outputs, (leaf,), grads[: len(outputs)])[0]
        for block, part in zip(waiting, gradient.split([block.x.shape[2] for block in waiting], 2), strict=True):
            block.store(part)
        waiting.clear()

    def pull(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The leaves' gradients by autograd; those of the map's tensors are added up."""
        gradients = pulled(outputs, (*leaves, *self._tensors), grads)
        for total, grad in zip(self._totals, gradients[len(leaves) :], strict=True):
            total += grad
        return gradients[: len(leaves)]


def pulled(outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The leaves' gradients; outputs that no leaf reaches add nothing."""
    live = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
    if not live:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    reached, live_grads = zip(*live, strict=True)
    return torch.autograd.grad(reached, leaves, live_grads, allow_unused=True, materialize_grads=True)
