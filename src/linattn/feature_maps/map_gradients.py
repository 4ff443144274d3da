"""From gradients of what a map returned to those of its inputs and tensors; letters as in feature_maps/__init__.py."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, pulled
from linattn.softmax.precision import accumulation_dtype

# Blocks whose gradients are to be found together: x (B, H, n, D), gradients (B, H, n, …) of what the map made of it,
# and where to store its own.
_Waiting = list[tuple[Tensor, list[Tensor], Callable[[Tensor], None]]]


class MapGradients:
    """From gradients of a map's outputs to those of its inputs, and to those of its followed tensors."""

    def __init__(self, feature_map: FeatureMap, tensors: Sequence[Tensor], *, at_once: int = 1) -> None:
        self._map, self._tensors, self._at_once = feature_map, tensors, at_once
        self._queries: _Waiting = []
        self._keys: _Waiting = []
        # Summed over blocks in at least float32.
        self._totals = [torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in tensors]

    def query(self, x: Tensor, grad: Tensor, store: Callable[[Tensor], None]) -> None:
        """Have the gradient of queries x (B, H, n, D) stored."""
        if self._tensors:
            self._wait(x, [grad], store, self._queries)
        else:
            store(self._map.query_vjp(x, grad))

    def key(self, x: Tensor, grads: tuple[Tensor, Tensor | None], store: Callable[[Tensor], None]) -> None:
        """Have the gradient of keys x (B, H, n, D) stored, from those of their features and logarithmic weights."""
        if self._tensors or grads[1] is not None:
            self._wait(x, [grad for grad in grads if grad is not None], store, self._keys)
        else:
            store(self._map.key_vjp(x, grads[0]))

    def finish(self) -> list[Tensor]:
        """Store what waits, and give the gradients of the followed tensors."""
        for waiting in (self._queries, self._keys):
            if waiting:
                self._follow(waiting)
        return self._totals

    def _wait(self, x: Tensor, grads: list[Tensor], store: Callable[[Tensor], None], waiting: _Waiting) -> None:
        """Have autograd find gradients of blocks `at_once`: a graph for each costs more than its arithmetic."""
        # Copies, since the next block is written over this one.
        waiting.append((x.clone(), [grad.clone() for grad in grads], store))
        if len(waiting) == self._at_once:
            self._follow(waiting)

    def _follow(self, waiting: _Waiting) -> None:
        """By autograd, with one graph for all that wait."""
        blocks, grads_of_blocks, stores = zip(*waiting, strict=True)
        with torch.enable_grad():
            leaf = torch.cat(blocks, 2).requires_grad_()
            is_key = waiting is self._keys
            outputs = [self._map.key(leaf) if is_key else self._map.query(leaf)]
            weight = self._map.key_log_weight(leaf) if is_key and not self._map.exponential else None
            outputs += [] if weight is None else [weight]
        grads = [torch.cat(parts, 2) for parts in zip(*grads_of_blocks, strict=True)]
        gradient = self.pull(outputs, (leaf,), grads[: len(outputs)])[0]
        for store, part in zip(stores, gradient.split([x.shape[2] for x in blocks], 2), strict=True):
            store(part)
        waiting.clear()

    def pull(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The leaves' gradients by autograd; those of the map's tensors are added up."""
        gradients = pulled(outputs, (*leaves, *self._tensors), grads)
        for total, grad in zip(self._totals, gradients[len(leaves) :], strict=True):
            total += grad
        return gradients[: len(leaves)]
