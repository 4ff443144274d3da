"""The op, its state and its backends: q, k, v -> features -> state -> read-out.

Letters: B batch, H query heads, in states and backends key/value heads, Hkv key/value heads, G query heads per
key/value head, L tokens (Lq, Lk), n tokens kept or chosen, D head width, Dv value width, R features, M exponents kept
per head (the map's num_exponents: R for exponential maps, one per group for grouped ones, else 1).
"""

from linattn.attention.functional import linear_attention as linear_attention
from linattn.attention.functional import linear_attention_with_state as linear_attention_with_state
from linattn.attention.functional import linear_partial as linear_partial
from linattn.attention.functional import linear_partial_with_state as linear_partial_with_state
from linattn.attention.packed import linear_attention_packed as linear_attention_packed
from linattn.attention.packed import linear_attention_packed_with_state as linear_attention_packed_with_state
from linattn.attention.rows import attention_rows as attention_rows
from linattn.attention.state import State as State
