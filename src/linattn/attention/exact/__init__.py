"""Exact softmax attention on a few keys, the map for all others: which keys are exact, and how the parts combine.

The parts' keys are disjoint and every part is a sum over its own keys, so that nothing is subtracted; they combine by
their log-normalisers. Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv
value width, w tokens of a window's block, g heavy keys.
"""

from linattn.attention.exact.bidirectional import attend as attend_bidirectional
from linattn.attention.exact.causal import attend as attend_causal
from linattn.attention.exact.heavy import attend_to_all as attend_to_all
from linattn.attention.exact.keys import ExactKeys as ExactKeys
from linattn.attention.exact.rule import Exact as Exact
from linattn.attention.exact.rule import parse_exact as parse_exact

__all__ = ["Exact", "ExactKeys", "attend_bidirectional", "attend_causal", "attend_to_all", "parse_exact"]
