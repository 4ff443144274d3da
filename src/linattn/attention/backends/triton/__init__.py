"""Kernels for CUDA GPUs, written in Triton: features are made inside them and never stored.

Triton is imported when the first call comes: this package can be imported, and asked for its objections, without it.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv value width, R
features, M exponents kept per head (the map's num_exponents).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from linattn.attention.backends.alignment import attend_aligned
from linattn.attention.backends.backend import Call, Rows
from linattn.attention.backends.blocked import Blocked
from linattn.attention.backends.blocked.records import Absorb, Causal, Read
from linattn.attention.backends.triton.objections import objections
from linattn.attention.following import is_followed, is_traced
from linattn.attention.sums import Sums


class Triton:
    """Fused kernels on a GPU; bitwise the same from run to run, earlier rows whatever later keys are."""

    def objections(self, call: Call) -> list[str]:
        """Every reason why the kernels cannot run the call."""
        return objections(call)

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """One pass over the keys, one over the queries; or the causal fold, in one pass over both."""
        return attend_aligned(self, call, before, partial(self._causal, span=span))

    def _causal(self, call: Call, before: Sums, span: int) -> tuple[Rows, Sums]:
        """The fold over as many keys as queries."""
        inputs = Causal(call.query, call.key, call.value, *before, call.bias)
        if call.key.shape[2] == 1 and not span and _is_bare(call, before):
            # Imported here: the kernels need Triton, and `import linattn` needs torch alone.
            from linattn.attention.backends.triton.stepping import step

            return step(call.bound.feature_map, inputs)
        found = _run("causal", call, inputs, span)
        return Rows(found.out, found.den, found.reference), Sums(found.S, found.z, found.m)

    def absorb(self, call: Call, before: Sums) -> Sums:
        """One pass over the keys."""
        found: Sums = _run("absorb", call, Absorb(call.key, call.value, *before, call.bias))
        return found

    def read(self, call: Call, sums: Sums) -> Rows:
        """One pass over the queries."""
        found = _run("read", call, Read(call.query, *sums))
        return Rows(found.out, found.den, found.reference)

    def column_mass(self, call: Call) -> Tensor:
        """As the blocked backend has it: a constant, of plain torch on any device."""
        return Blocked().column_mass(call)


def _is_bare(call: Call, before: Sums) -> bool:
    """Whether nothing follows the call, and its map is exponential or an expansion: one token then takes one launch."""
    is_known = call.bound.feature_map.exponential or call.bound.is_grouped
    if call.bound.tensors or not is_known or is_traced(call.key):
        return False
    return not is_followed(call.query, call.key, call.value, *before, call.bias)


def _run(name: str, call: Call, inputs: Any, span: int = 0) -> Any:
    """Run a fold, in the table from the first call on."""
    # Imported here: the kernels need Triton, and `import linattn` needs torch alone.
    from linattn.attention.backends.triton import folding

    name = f"triton {name} around centres" if call.bound.is_grouped else f"triton {name}"
    return folding.run(name, call.bound, inputs, span)
