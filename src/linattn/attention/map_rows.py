"""Rows that a backend reads, as partial results on the kernel's true scale.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens.
"""

from __future__ import annotations

import torch

from linattn.attention.backends import Backend, Call, Rows, regular
from linattn.attention.sums import Sums
from linattn.softmax.partial import Partial


def as_partial(call: Call, rows: Rows) -> Partial:
    """The rows (B, H, G, L, …) of a call as a partial result of that shape, on the kernel's true scale."""
    # The guarded logarithm keeps the gradient of rows that saw no key at 0 instead of NaN.
    log_normalizer = torch.where(rows.den == 0, -torch.inf, regular(rows.den).log() + rows.reference)
    weight = call.bound.query_log_weight(call.query.to(rows.den.dtype))
    return Partial(rows.out, log_normalizer if weight is None else log_normalizer + weight)


def map_rows(call: Call, backend: Backend, before: Sums, *, span: int = 0) -> tuple[Partial, Sums]:
    """`Backend.attend` with its rows as a partial result."""
    rows, after = backend.attend(call, before, span=span)
    return as_partial(call, rows), after
