"""Experimental kernels for CUDA GPUs, written in Triton: features are made inside them and never stored.

They ran in Triton's interpreter alone, never on a GPU: `backend="triton"` calls them, and "auto" leaves them out.

Triton is imported when the first call comes: this package can be asked for its objections without it.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv value width, R
features, M exponents kept per head (the map's num_exponents).
"""

from __future__ import annotations

from types import ModuleType

from linattn.attention.backends.backend import Call, Rows, attend_aligned
from linattn.attention.backends.blocked.fold import run
from linattn.attention.backends.blocked.records import Absorb, Causal, Read
from linattn.attention.sums import Sums
from linattn.softmax.tracing import is_followed, is_traced
from linattn_triton.objections import objections

__version__ = "0.1.0"
INTERFACE = 1
"""Raised with every change of what linattn calls here, or of what these kernels take from linattn."""


class Kernels:
    """Fused kernels on a GPU, experimental; bitwise the same from run to run, earlier rows whatever later keys are."""

    def objections(self, call: Call) -> list[str]:
        """Every reason why the kernels cannot run the call."""
        return objections(call)

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """One pass over the keys, one over the queries; or the causal fold, in one pass over both."""
        if not call.is_causal:
            after = self.absorb(call, before)
            return self.read(call, after), after
        if call.key.shape[2] == call.query.shape[3]:
            return self.fold(call, before, span)
        return attend_aligned(self, self.fold, call, before, span)

    def fold(self, call: Call, before: Sums, span: int) -> tuple[Rows, Sums]:
        """Causal rows of as many queries as keys, and the sums after them."""
        inputs = Causal(call.query, call.key, call.value, *before, call.bias)
        if call.key.shape[2] == 1 and not span and _is_bare(call, before):
            # Imported here: the kernels need Triton, and objections do not.
            from linattn_triton.stepping import step

            return step(call.bound.feature_map, inputs)
        outputs = run(_folds().CAUSAL, call.bound, inputs, span)
        return Rows(outputs.out, outputs.den, outputs.reference), Sums(outputs.S, outputs.z, outputs.m)

    def absorb(self, call: Call, before: Sums) -> Sums:
        """One pass over the keys."""
        after: Sums = run(_folds().ABSORB, call.bound, Absorb(call.key, call.value, *before, call.bias))
        return after

    def read(self, call: Call, sums: Sums) -> Rows:
        """One pass over the queries."""
        outputs = run(_folds().READ, call.bound, Read(call.query, *sums))
        return Rows(outputs.out, outputs.den, outputs.reference)


def _is_bare(call: Call, before: Sums) -> bool:
    """Whether nothing follows the call, and its map is exponential: one token then takes one launch."""
    if call.bound.tensors or not call.bound.feature_map.exponential or is_traced(call.key):
        return False
    return not is_followed(call.query, call.key, call.value, *before, call.bias)


def _folds() -> ModuleType:
    """This backend's folds."""
    # Imported here: the kernels need Triton, and objections do not.
    from linattn_triton import folds

    return folds
