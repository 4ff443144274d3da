"""The fold by blocks in plain torch, forward and backward, on any device; the CPU's fast path.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, n tokens of a block, D head width, Dv
value width, R features, M exponents kept per head (the map's num_exponents).
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends.backend import Call, Rows
from linattn.attention.backends.blocked import stepping
from linattn.attention.backends.blocked.fold import Task, is_followed, run
from linattn.attention.backends.blocked.records import Absorb, Causal, CausalOutputs, Read
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
        if is_step and _is_bare(bound, query, key, value, *before, bias):
            with outside_autocast(query.device):
                return stepping.forward(bound.feature_map, Causal(query, key, value, *before, bias))
        early, late = query[..., : max(-extra, 0), :], query[..., max(-extra, 0) :, :]
        found: CausalOutputs = run(Task("causal", span), bound, Causal(late, key, value, *before, bias))
        rows, after = Rows(found.out, found.den, found.reference), Sums(found.S, found.z, found.m)
        if extra < 0:
            first_rows = self.read(bound, early, before)
            rows = Rows(*(torch.cat(pair, 3) for pair in zip(first_rows, rows, strict=True)))
        return rows, after

    def absorb(self, bound: BoundMap, key: Tensor, value: Tensor, bias: Tensor | None, before: Sums) -> Sums:
        """One pass over the keys."""
        after: Sums = run(Task("absorb"), bound, Absorb(key, value, *before, bias))
        return after

    def read(self, bound: BoundMap, query: Tensor, sums: Sums) -> Rows:
        """One pass over the queries."""
        rows: Rows = run(Task("read"), bound, Read(query, *sums))
        return rows

    def column_mass(self, bound: BoundMap, query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
        """Two passes: the queries' features over their denominators are summed, then read by each key."""
        query, key, bound = query.detach(), key.detach(), bound.detach()
        bias = None if bias is None else bias.detach()
        with torch.no_grad():
            kept = accumulation_dtype(key.dtype)
            before = no_sums(bound.feature_map, key.shape[0], key.shape[1], 0, kept, key.device)
            after = self.absorb(bound, key, key[..., :0], bias, before)
            mass: Tensor = run(Task("mass"), bound, Causal(query, key, key[..., :0], *after, bias)).mass
        return mass


def _is_bare(bound: BoundMap, *tensors: Tensor | None) -> bool:
    """True if autograd, compile and functorch are inactive, and the map uses its own tensors."""
    return not bound.tensors and not torch.compiler.is_compiling() and not is_followed(*tensors)
