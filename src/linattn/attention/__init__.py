"""The op, its state and its backends: q, k, v -> features -> state -> read-out."""

from linattn.attention.exact import Exact as Exact
from linattn.attention.functional import Attended as Attended
from linattn.attention.functional import linear_attention as linear_attention
from linattn.attention.functional import linear_attention_with_state as linear_attention_with_state
from linattn.attention.functional import linear_partial as linear_partial
from linattn.attention.packed import linear_attention_packed as linear_attention_packed
from linattn.attention.packed import linear_attention_packed_with_state as linear_attention_packed_with_state
from linattn.attention.partial import Partial as Partial
from linattn.attention.partial import combine as combine
from linattn.attention.rows import attention_rows as attention_rows
from linattn.attention.softmax import softmax_attention as softmax_attention
from linattn.attention.softmax import softmax_partial as softmax_partial
from linattn.attention.state import State as State
