"""Interface of a backend: how keys are folded into sums, and how queries read them.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from linattn.attention.bound_map import BoundMap
from linattn.attention.sums import Sums


class Rows(NamedTuple):
    """Rows of queries: outputs, and denominators Σ φ(q)·φ(k)·exp(-reference); 0 and 0 where no key was seen."""

    out: Tensor  # (B, H, G, Lq, Dv), in the query's dtype
    den: Tensor  # (B, H, G, Lq)
    reference: Tensor  # (B, H, G, Lq)


def regular(den: Tensor) -> Tensor:
    """Denominators to divide by: 1 for those of rows that saw no key, and no gradient through denormal ones, whose
    inverse is beyond the dtype.
    """
    faint = torch.where(den == 0, 1, den).detach()
    return torch.where(den.abs() < torch.finfo(den.dtype).tiny, faint, den)


class Call(NamedTuple):
    """One call of attention as backends take it: checked, queries grouped by key/value head."""

    bound: BoundMap
    query: Tensor  # (B, H, G, Lq, D)
    key: Tensor  # (B, H, Lk, D)
    value: Tensor  # (B, H, Lk, Dv)
    bias: Tensor | None  # (B, H or 1, Lk), in the accumulation dtype, -inf for masked keys
    is_causal: bool

    def with_keys(self, part: slice) -> Call:
        """The call over some of its keys."""
        bias = None if self.bias is None else self.bias[..., part]
        return self._replace(key=self.key[:, :, part], value=self.value[:, :, part], bias=bias)


class Backend(Protocol):
    """Three functions of a call. Differentiable in all tensors, by whatever means.

    A key's weight is φ(q)·φ(k)·exp(bias); one of bias -inf is inert, whatever it holds. The maximum m of the sums is
    a constant for gradients.
    """

    def objections(self, call: Call) -> list[str]:
        """Every reason why this backend cannot run the call; none if it can."""
        ...

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """Queries over the sums' keys and the call's, and the sums after all; causal is aligned bottom-right.

        With `span`, for as many queries as keys, causal rows see the keys of earlier spans of so many tokens only.
        """
        ...

    def absorb(self, call: Call, before: Sums) -> Sums:
        """The sums after the call's keys."""
        ...

    def read(self, call: Call, sums: Sums) -> Rows:
        """The call's queries over the sums' keys alone."""
        ...
