"""Exact softmax attention on near keys, the map for all others: which keys, and how parts combine.

The parts' keys are disjoint and every part is a sum over its own keys, so that nothing is subtracted; they combine by
their log-normalisers. Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv
value width, w tokens of a window's block.
"""

from linattn.attention.window.calls import attend_around as attend_around
from linattn.attention.window.calls import attend_with_window as attend_with_window
from linattn.attention.window.keys import WindowKeys as WindowKeys
from linattn.attention.window.keys import check_width as check_width
from linattn.attention.window.keys import check_window as check_window
from linattn.attention.window.keys import decayed as decayed
from linattn.attention.window.keys import shares_normalizer as shares_normalizer
