"""Ways to bound what a causal layer keeps of a text, compared at equal bytes: one rule a file.

Each is written from its paper's definition and answers a whole text as its stream would: a query sees what is held by
then, and its own block. Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, n held keys,
D head width, Dv value width.
"""

from linattn.lab.contenders.contender import Contender as Contender
from linattn.lab.contenders.contender import Sizes as Sizes
from linattn.lab.contenders.shelf import KINDS as KINDS
from linattn.lab.contenders.shelf import at_budget as at_budget
