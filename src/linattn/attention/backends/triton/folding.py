"""The folds of this backend, in the table of folds, from which autograd, torch.compile and torch.func run them."""

from __future__ import annotations

from linattn.attention.backends.blocked.fold import FOLDS, Fold
from linattn.attention.backends.blocked.fold import run as run
from linattn.attention.backends.blocked.records import Absorb, Causal, Read, empty_sums
from linattn.attention.backends.triton import absorbing, causal, expanding, reading
from linattn.attention.sums import Sums

# Opaque to torch.compile: torch.library.wrap_triton leaves tensors within a kernel's records out of the graph.
FOLDS["triton absorb"] = Fold(
    absorbing.absorb, absorbing.absorb_backward, Absorb, Sums, lambda given, _: empty_sums(given), "triton"
)
FOLDS["triton read"] = Fold(
    reading.read, reading.read_backward, Read, reading.ReadOutputs, lambda given, _: reading.empty_like(given), "triton"
)
FOLDS["triton causal"] = Fold(
    causal.forward, causal.backward, Causal, causal.CausalOutputs, causal.empty_like, "triton"
)
FOLDS["triton absorb around centres"] = Fold(
    expanding.absorb, expanding.absorb_backward, Absorb, Sums, lambda given, _: empty_sums(given), "triton"
)
FOLDS["triton read around centres"] = Fold(
    expanding.read,
    expanding.read_backward,
    Read,
    expanding.ExpandedRows,
    lambda given, _: expanding.empty_rows_of(given),
    "triton",
)
FOLDS["triton causal around centres"] = Fold(
    expanding.causal, expanding.causal_backward, Causal, expanding.ExpandedCausal, expanding.empty_like, "triton"
)
