"""Inputs, outputs and saved tensors of the folds, as named tensors; letters as in blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

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

    def join(self, other: KeyGradients, rule: Callable[[Tensor, Tensor], Tensor]) -> KeyGradients:
        """Both by a rule, tensor by tensor."""
        features = rule(self.features, other.features)
        if self.weight is None or other.weight is None:
            return KeyGradients(features)
        return KeyGradients(features, rule(self.weight, other.weight))


class Gradients(NamedTuple):
    """Output of a backward pass."""

    inputs: Sequence[Tensor]  # in the order of the inputs' record, without m and the biases
    bias: Tensor | None  # None where none is wanted
    tensors: list[Tensor]  # of the map's, in at least float32
