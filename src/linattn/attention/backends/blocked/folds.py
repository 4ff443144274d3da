"""The folds of this backend; letters as in blocked/__init__.py."""

from __future__ import annotations

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked import absorbing, causal, reading
from linattn.attention.backends.blocked.fold import Fold
from linattn.attention.backends.blocked.records import Absorb, Causal, CausalOutputs, Read, empty_sums
from linattn.attention.backends.blocked.rows import empty_rows
from linattn.attention.sums import Sums

ABSORB = Fold(
    "blocked.folds:ABSORB",
    absorbing.absorb,
    absorbing.absorb_backward,
    Absorb,
    Sums,
    lambda inputs, _: empty_sums(inputs),
)
READ = Fold(
    "blocked.folds:READ",
    reading.read,
    reading.read_backward,
    Read,
    Rows,
    lambda inputs, _: empty_rows(inputs.query, inputs.S),
)
CAUSAL = Fold("blocked.folds:CAUSAL", causal.forward, causal.backward, Causal, CausalOutputs, causal.empty_outputs)
