"""Exact softmax attention, and what both products share: checks, masks, precision, and partial results that combine.

Letters: B batch, H heads, Hkv key/value heads, G query heads per key/value head, L tokens, n tokens kept, D head width,
Dv value width.
"""

from linattn.softmax.attention import softmax_attention as softmax_attention
from linattn.softmax.attention import softmax_partial as softmax_partial
from linattn.softmax.partial import Attended as Attended
from linattn.softmax.partial import AttendedPartial as AttendedPartial
from linattn.softmax.partial import Partial as Partial
from linattn.softmax.partial import combine as combine
