"""The folds of this backend, which autograd, torch.compile and torch.func run as they run those of plain torch.

Opaque to torch.compile: torch.library.wrap_triton leaves tensors within a kernel's records out of the graph.
"""

from __future__ import annotations

from linattn.attention.backends.blocked.fold import Fold
from linattn.attention.backends.blocked.records import Absorb, Causal, Read, empty_sums
from linattn.attention.backends.triton import absorbing, causal, reading
from linattn.attention.sums import Sums

ABSORB = Fold(
    "triton.folds:ABSORB",
    absorbing.absorb,
    absorbing.absorb_backward,
    Absorb,
    Sums,
    lambda inputs, _: empty_sums(inputs),
)
READ = Fold(
    "triton.folds:READ",
    reading.read,
    reading.read_backward,
    Read,
    reading.ReadOutputs,
    lambda inputs, _: reading.empty_like(inputs),
)
CAUSAL = Fold("triton.folds:CAUSAL", causal.forward, causal.backward, Causal, causal.CausalOutputs, causal.empty_like)
