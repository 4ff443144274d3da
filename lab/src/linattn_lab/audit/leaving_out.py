"""Methods that cannot pay: their state outgrows all keys and values of any text a model is likely to read.

Letters: L tokens, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from linattn.methods.measures import exact_state_numbers
from linattn.methods.method import Method
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.built_methods import build
from linattn_lab.costs import state_numbers

# Errors were found not to grow up to this length; a method that keeps more than its keys and values is of no use there.
_LENGTH = 8192


def unpayable(grid: AuditGrid, widths: Iterable[tuple[int, int]], *, scale: float, num_tokens: int) -> dict[str, str]:
    """Methods that keep more numbers than exact attention does, at 8,192 tokens and at the text's own length.

    Example:
        >>> from linattn.methods.method import parse_method
        >>> wanted = AuditGrid((parse_method("Taylor(order=1)"), parse_method("Taylor(order=2)")))
        >>> list(unpayable(wanted, [(256, 256)], scale=1.0, num_tokens=512))
        ['Taylor(order=2)']
    """
    length, found = max(num_tokens, _LENGTH), {}
    for method in grid.methods:
        for head_dim, value_dim in sorted(set(widths)):
            kept = _least_state(grid, method, head_dim, value_dim, scale)
            if kept > exact_state_numbers(length, head_dim=head_dim, value_dim=value_dim):
                found[method.label] = (
                    f"on heads {head_dim} wide its state has {kept:,} numbers, as many as the keys and values of "
                    f"{ceil(kept / (head_dim + value_dim)):,} tokens"
                )
    return found


def _least_state(grid: AuditGrid, method: Method, head_dim: int, value_dim: int, scale: float) -> int:
    """Numbers the method keeps per head at the narrowest width measured."""
    width = min(grid.features) if method.takes_features else None
    built = build(method, head_dim, num_features=width, scale=scale, seed=0)
    return state_numbers(built, value_dim=value_dim)
