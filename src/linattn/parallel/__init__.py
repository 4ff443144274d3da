"""Sequences longer than one machine holds, on torch.distributed: ranks exchange states, not keys.

| function | exchanges per layer, forward and again backward | bytes per rank |
|---|---|---|
| `linear_attention` | one all-gather; with a window one all-to-all more | constant in the length |
| `absorb` | one all-gather | constant in the length |

Before all others goes one all-gather of 24 bytes per rank, a digest of the call and its lengths: ranks whose calls
differ are refused, on all of them, by a `ValueError` that names them and what differs.

`ContextParallel` makes attention layers take parts of sequences. Letters: P ranks, B batch, H query heads, Hkv
key/value heads, L tokens of a rank (Lq, Lk), E a layer's width, D head width, Dv value width, R features, M exponents.
"""

from linattn.parallel.context_parallel import ContextParallel as ContextParallel
from linattn.parallel.functional import absorb as absorb
from linattn.parallel.functional import linear_attention as linear_attention
