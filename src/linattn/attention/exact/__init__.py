"""Exact softmax attention on a few keys, the map or merged keys for all others: which keys, and how parts combine.

The parts' keys are disjoint and every part is a sum over its own keys, so that nothing is subtracted; they combine by
their log-normalisers. Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv
value width, w tokens of a window's block, g heavy keys, C merged keys.
"""

from linattn.attention.exact.bidirectional import attend_around as attend_around
from linattn.attention.exact.bidirectional import attend_bidirectional as attend_bidirectional
from linattn.attention.exact.causal import attend_causal as attend_causal
from linattn.attention.exact.heavy import attend_to_all as attend_to_all
from linattn.attention.exact.keys import ExactKeys as ExactKeys
from linattn.attention.exact.merged.bidirectional import attend_all_merging as attend_all_merging
from linattn.attention.exact.merged.causal import MergedKeys as MergedKeys
from linattn.attention.exact.merged.causal import Merging as Merging
from linattn.attention.exact.merged.causal import attend_causal_merging as attend_causal_merging
from linattn.attention.exact.rule import Exact as Exact
from linattn.attention.exact.rule import begins_exact as begins_exact
from linattn.attention.exact.rule import check_exact as check_exact
from linattn.attention.exact.rule import did_you_mean as did_you_mean
from linattn.attention.exact.rule import exact_words as exact_words
from linattn.attention.exact.rule import parse_exact as parse_exact
from linattn.attention.exact.weighted_reading import Reading as Reading
