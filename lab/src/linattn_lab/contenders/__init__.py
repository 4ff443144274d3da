"""Ways to bound what a causal layer keeps of a text, compared at equal bytes: one rule a file.

Each is written from its paper's definition and answers a whole text as its stream would: a query sees what is held by
then, and its own block. Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, n held keys,
D head width, Dv value width.
"""

from linattn.kv_cache.budget import Sizes as Sizes
from linattn_lab.contenders.contender import Contender as Contender
from linattn_lab.contenders.shelf import KINDS as KINDS
from linattn_lab.contenders.shelf import at_budget as at_budget
