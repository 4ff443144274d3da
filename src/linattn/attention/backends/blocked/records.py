"""What the folds take, return and keep for their gradients, as named tensors; letters as in blocked/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from linattn.attention.backends.blocked.features import Keys
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
    """As many queries as keys, and the sums before them."""

    query: Tensor
    key: Tensor
    value: Tensor
    S: Tensor
    z: Tensor
    m: Tensor
    bias: Tensor | None = None


class Mass(NamedTuple):
    """Queries, keys, and the sums after these keys."""

    query: Tensor
    key: Tensor
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


class MassOutputs(NamedTuple):
    """The masses of the keys."""

    mass: Tensor  # (B, H, L)


def sums_of(inputs: Absorb | Read | Causal | Mass) -> Sums:
    """The sums a fold is given."""
    return Sums(inputs.S, inputs.z, inputs.m)


class Saved(NamedTuple):
    """What a backward pass is given: a forward pass, and the gradients of its outputs in their own record."""

    inputs: Any
    outputs: Any
    grads: Any
    tensors: Sequence[Tensor]  # those of the map that gradients follow
    bias_grad: bool  # whether the biases' gradient is wanted


class BlockState(NamedTuple):
    """A block as the recomputation of its segment left it."""

    block: slice
    before: Sums
    c: Tensor  # the exponent after it, (B, H, M)
    x: Tensor  # its keys (B, H, n, D)
    keys: Keys  # an exponential map's are turned relative to c
    phi_k: Tensor  # (B, H, n, R), relative to c
    safe: Tensor | None  # (B, H) bool: heads whose rows share c; None for all


class BlockGradients(NamedTuple):
    """Gradients of a block's tokens, and of S and z before it."""

    query: Tensor  # (B, H, G·n, D)
    key: Tensor  # (B, H, n, D)
    value: Tensor  # (B, H, n, Dv)
    S: Tensor
    z: Tensor


class Gradients(NamedTuple):
    """What a backward pass returns."""

    inputs: Sequence[Tensor]  # in the order of the inputs' record, without m and the biases
    bias: Tensor | None  # None where none is wanted
    tensors: list[Tensor]  # of the map's, in at least float32
