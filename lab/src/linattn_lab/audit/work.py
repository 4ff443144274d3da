"""How much work the parts of an audit are, for an estimate of the time they take.

Measured on all-MiniLM-L6-v2 and 512 tokens of text; elsewhere the pace so far corrects it.
"""

from __future__ import annotations

from linattn.methods.method import Method

EXACT = 3.0
"""One layer's exact answers, by which a machine is timed: in float64, and once, where methods are timed warm."""
RANKS = 15.0
"""The limits of one layer's heads."""
PASS = 1.0
"""A forward pass, by layer."""
TIMED = 8.0
"""The time of the whole model, in passes."""
LENGTHS = 100.0
"""The times of one layer at growing lengths, of all methods that are worth it."""

_MAP, _COLUMNS = 3.0, 128


def heads_work(method: Method, num_tokens: int) -> float:
    """The figures of one layer's heads; without a map's features rows of the matrix are read off column by column."""
    if method.map is not None and method.window is None:
        return _MAP
    return _MAP * (1 + num_tokens / _COLUMNS)
