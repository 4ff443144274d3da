"""The fold by blocks in plain torch, forward and backward, on any device; the CPU's fast path.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, n tokens of a block, D head width, Dv
value width, R features, M exponents kept per head (the map's num_exponents).
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends.backend import Call, Rows
from linattn.attention.backends.blocked import fold, stepping
from linattn.attention.bound_map import BoundMap, outside_autocast
from linattn.attention.sums import Sums, accumulation_dtype, no_sums


class Blocked:
    """Blocks of tokens on any device; takes every call."""

    def objections(self, call: Call) -> list[str]:
        """None."""
        return []

    def attend(
        self,
        bound: BoundMap,
        query: Tensor,  # (B, H, G, Lq, D)
        key: Tensor,  # (B, H, Lk, D)
        value: Tensor,  # (B, H, Lk, Dv)
        bias: Tensor | None,  # (B, H or 1, Lk)
        before: Sums,
        *,
        is_causal: bool,
        span: int = 0,
    ) -> tuple[Rows, Sums]:
        """Absorb, then read; or the causal fold over as many keys as queries, the others absorbed or read apart."""
        if not is_causal:
            after = self.absorb(bound, key, value, bias, before)
            return self.read(bound, query, after), after
        extra = key.shape[2] - query.shape[3]
        if extra > 0:
            first = None if bias is None else bias[..., :extra]
            before = self.absorb(bound, key[:, :, :extra], value[:, :, :extra], first, before)
            key, value, bias = key[:, :, extra:], value[:, :, extra:], None if bias is None else bias[..., extra:]
        is_step = key.shape[2] == 1 and extra >= 0 and not (span or bound.is_grouped)
        if is_step and _is_bare(bound, bias, query, key, value, *before):
            with outside_autocast(query.device):
                out, den, reference, *sums = stepping.forward(bound.feature_map, bias, query, key, value, *before)
            return Rows(out, den, reference), Sums(*sums)
        early, late = query[..., : max(-extra, 0), :], query[..., max(-extra, 0) :, :]
        task = fold.Task("grouped_causal" if bound.is_grouped else "causal", span)
        found = _run(task, bound, bias, late, key, value, *before)
        rows, after = Rows(*found[:3]), Sums(*found[3:6])
        if extra < 0:
            first_rows = self.read(bound, early, before)
            rows = Rows(*(torch.cat(pair, 3) for pair in zip(first_rows, rows, strict=True)))
        return rows, after

    def absorb(self, bound: BoundMap, key: Tensor, value: Tensor, bias: Tensor | None, before: Sums) -> Sums:
        """One pass over the keys."""
        return Sums(*_run(fold.Task("absorb"), bound, bias, key, value, *before))

    def read(self, bound: BoundMap, query: Tensor, sums: Sums) -> Rows:
        """One pass over the queries."""
        return Rows(*_run(fold.Task("grouped_read" if bound.is_grouped else "read"), bound, None, query, *sums))

    def column_mass(self, bound: BoundMap, query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
        """Two passes: the queries' features over their denominators are summed, then read by each key."""
        query, key, bound = query.detach(), key.detach(), bound.detach()
        bias = None if bias is None else bias.detach()
        with torch.no_grad():
            kept = accumulation_dtype(key.dtype)
            before = no_sums(bound.feature_map, key.shape[0], key.shape[1], 0, kept, key.device)
            after = self.absorb(bound, key, key[..., :0], bias, before)
            (mass,) = _run(fold.Task("mass"), bound, bias, query, key, *after)
        return mass


def _run(task: fold.Task, bound: BoundMap, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run one fold, as an opaque operator while a compiler traces."""
    if not torch.compiler.is_compiling():
        return fold.run(task, bound, bias, *inputs)
    # Imported here: torch's marks for its compiler import the compiler.
    from linattn.attention.backends.blocked import opaque

    return opaque.run(task, bound, bias, *inputs)


def _is_bare(bound: BoundMap, bias: Tensor | None, *tensors: Tensor) -> bool:
    """True if autograd, compile and functorch are inactive, and the map uses its own tensors."""
    followed = tensors if bias is None else (*tensors, bias)
    return not bound.tensors and not torch.compiler.is_compiling() and not fold.is_followed(*followed)
