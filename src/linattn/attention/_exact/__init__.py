"""Exact softmax attention on a few keys, the map for all others: who is exact, and how the parts meet.

The parts' keys are disjoint and every part is a sum over its own keys, so that nothing is subtracted; they combine by
their log-normalisers. Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv
value width, w tokens of a window's block, g heavy keys.
"""

from linattn.attention._exact.bidirectional import attend as attend_bidirectional
from linattn.attention._exact.causal import Stream as Stream
from linattn.attention._exact.causal import attend as attend_causal
from linattn.attention._exact.far import Far as Far
from linattn.attention._exact.keys import ExactKeys as ExactKeys

__all__ = ["ExactKeys", "Far", "Stream", "attend_bidirectional", "attend_causal"]
