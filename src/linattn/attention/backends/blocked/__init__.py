"""The fold by blocks in plain torch, forward and backward, on any device; the CPU's fast path.

Letters as in attention/__init__.py: H key/value heads, n tokens of a block.
"""

import torch
from torch import Tensor

from linattn.attention.backends.backend import Call, Rows, attend_aligned
from linattn.attention.backends.blocked.blocks import RISE, exponential_
from linattn.attention.backends.blocked.causal import sweep
from linattn.attention.backends.blocked.fold import run
from linattn.attention.backends.blocked.folds import ABSORB, CAUSAL, READ
from linattn.attention.backends.blocked.records import Absorb, Causal, CausalOutputs, Read
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap
from linattn.softmax.precision import outside_autocast
from linattn.softmax.tracing import is_followed, is_traced


class Blocked:
    """Blocks of tokens on any device; takes every call."""

    def objections(self, call: Call) -> list[str]:
        """None."""
        return []

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """One pass over the keys, one over the queries; or the causal fold, in one pass over both."""
        bound, query, key, value, bias, is_causal = call
        if not is_causal:
            after: Sums = run(ABSORB, bound, Absorb(key, value, *before, bias))
            return run(READ, bound, Read(query, *after)), after
        if key.shape[2] == query.shape[3]:
            return self.fold(call, before, span)
        return attend_aligned(self, self.fold, call, before, span)

    def fold(self, call: Call, before: Sums, span: int) -> tuple[Rows, Sums]:
        """Causal rows of as many queries as keys, and the sums after them."""
        bound, query, key, value, bias, _ = call
        inputs = Causal(query, key, value, *before, bias)
        if is_traced(key) or is_followed(*inputs, *bound.tensors.values()):
            outputs: CausalOutputs = run(CAUSAL, bound, inputs, span)
            return Rows(outputs.out, outputs.den, outputs.reference), Sums(outputs.S, outputs.z, outputs.m)
        with outside_autocast(query.device):
            # The step's map must use its own tensors.
            if key.shape[2] == 1 and not (span or bound.is_grouped or bound.tensors):
                return _step(bound.feature_map, inputs)
            return sweep(bound.swapped, inputs, span)

    def absorb(self, call: Call, before: Sums) -> Sums:
        """One pass over the keys."""
        after: Sums = run(ABSORB, call.bound, Absorb(call.key, call.value, *before, call.bias))
        return after

    def read(self, call: Call, sums: Sums) -> Rows:
        """One pass over the queries."""
        rows: Rows = run(READ, call.bound, Read(call.query, *sums))
        return rows


def _step(feature_map: FeatureMap, inputs: Causal) -> tuple[Rows, Sums]:
    """The row of one token, and the sums after it: those of absorb and read, for calls too small for blocks."""
    # It costs as much in calls as in arithmetic: one product for queries and key where the map allows, a pass over the
    # state to write it and one to read it. Exponents stay unless a key exceeds one by RISE: sums may be larger for it.
    query, key, value, S, z, m, bias = inputs
    q, k, v = query.squeeze(3), key, value
    if query.dtype != S.dtype:
        q, k, v = q.to(S.dtype), k.to(S.dtype), v.to(S.dtype)
    if bias is not None:
        k, v = (x.masked_fill((bias == -torch.inf).unsqueeze(-1), 0) for x in (k, v))
    t, key_output = _both(feature_map, q, k)
    log, linear = key_output, None
    if not feature_map.exponential:
        weight, linear = feature_map.key_log_weight(k), key_output
        log = m.new_zeros(()).expand(m.shape) if weight is None else weight.to(m.dtype)
    if bias is not None:
        log = log + bias
    phi = log - m
    # Not "greater": a NaN in one row leaves it open whether others rise.
    if phi.numel() and not phi.amax().item() <= RISE:
        # Head by head and feature by feature: those below keep their bits.
        c = torch.where(phi > RISE, log, m)
        decay = (m - c).exp_()
        S, z, m, phi = S * decay.unsqueeze(-1), z * decay, c, log - c
    phi = exponential_(phi)
    if linear is not None:
        phi = linear * phi
    S, z, column = torch.addcmul(S, phi.unsqueeze(-1), v), z + phi, m.unsqueeze(-2)
    if feature_map.exponential:
        # A map may give the query itself, which stays as it is.
        t = t + column
        reference = t.amax(-1, keepdim=True)
        t = exponential_(t.sub_(reference))
    else:
        reference = column.expand(*t.shape[:-1], 1)
    den, num = torch.linalg.vecdot(t, z.unsqueeze(-2)).unsqueeze(-1), torch.matmul(t, S)
    # An exponential map gives every key weight: only a masked one can leave a row without any.
    sees_key = feature_map.exponential and bias is None
    out = num.div_(den if sees_key else den.masked_fill(den == 0, torch.inf)).unsqueeze(3)
    return Rows(out if query.dtype == S.dtype else out.to(query.dtype), den, reference), Sums(S, z, m)


def _both(feature_map: FeatureMap, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Features or exponents of queries (B, H, G, D), and of the key (B, H, 1, D) with its token dimension dropped."""
    if type(feature_map).key is not FeatureMap.key:
        return feature_map.query(q).to(q.dtype), feature_map.key(k).to(q.dtype).squeeze(-2)
    x, powers = torch.cat((q, k), -2), feature_map.powers(q.dtype)
    both = feature_map.query(x).to(q.dtype) if powers is None or powers.is_composed else powers.exponents(x)
    return both.narrow(-2, 0, q.shape[-2]), both.select(-2, -1)
