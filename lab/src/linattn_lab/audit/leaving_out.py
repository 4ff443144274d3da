"""Methods that a model cannot call, or that cannot pay: their state outgrows the keys and values of any likely text.

Letters: L tokens, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from linattn.hf import AttentionCall
from linattn.methods.measures import exact_state_numbers
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.built_methods import build
from linattn_lab.costs import state_numbers

# Errors were found not to grow up to this length; a method that keeps more than its keys and values is of no use there.
_LENGTH = 8192


def unusable(grid: AuditGrid, calls: Sequence[AttentionCall]) -> dict[str, str]:
    """Why methods are of no use: a refusal of such calls, or more numbers than exact attention keeps.

    Those are counted at 8,192 tokens and at the calls' own length.

    Example:
        >>> import torch
        >>> from linattn.methods.method import parse_method
        >>> wanted = AuditGrid((parse_method("Taylor(order=1)"), parse_method("Taylor(order=2)")))
        >>> tokens = torch.zeros(3, 1, 1, 512, 256)
        >>> call = AttentionCall(0, "attention", *tokens, key_mask=None, is_causal=False, scale=1.0)
        >>> list(unusable(wanted, [call]))
        ['Taylor(order=2)']
    """
    num_tokens, scale, is_causal = calls[0].query.shape[2], calls[0].scale, calls[0].is_causal
    length, found = max(num_tokens, _LENGTH), {}
    widths = sorted({(call.query.shape[-1], call.value.shape[-1]) for call in calls})
    for method in grid.methods:
        width = min(grid.features) if method.takes_features else None
        for head_dim, value_dim in widths:
            built = build(method, head_dim, num_features=width, scale=scale, seed=0)
            try:
                built.check_call(num_tokens, is_causal=is_causal)
            except ValueError as error:
                found[method.label] = str(error)
                break
            kept = state_numbers(built, value_dim=value_dim)
            if kept > exact_state_numbers(length, head_dim=head_dim, value_dim=value_dim):
                found[method.label] = (
                    f"on heads {head_dim} wide its state has {kept:,} numbers, as many as the keys and values of "
                    f"{ceil(kept / (head_dim + value_dim)):,} tokens; --map measures it all the same"
                )
    return found
