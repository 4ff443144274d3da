"""How much work the parts of an audit are, for an estimate of the time they take.

Units: milliseconds of the core on which all-MiniLM-L6-v2 was measured, at 64 to 512 tokens, per layer but for lengths.
A part that takes long on short texts too is a constant; the exact answers, which are timed first, say how many units a
machine does in a second. For other models the pace so far corrects the estimate.
"""

from __future__ import annotations

from linattn.methods.method import Method


def exact_work(num_tokens: int) -> float:
    """One layer's exact answers, in float64."""
    return 0.05 * num_tokens + 1.7e-4 * num_tokens**2


def ranks_work(num_tokens: int) -> float:
    """The limits of one layer's heads, by singular values."""
    return 4.5e-3 * num_tokens**2


def pass_work(num_tokens: int) -> float:
    """A forward pass of the model under a method, by layer."""
    return 2.5 + 0.12 * num_tokens


def timed_work(num_tokens: int) -> float:
    """The times of forward passes under a method and under softmax, by layer."""
    return 50.0 + 0.55 * num_tokens


def lengths_work(num_tokens: int) -> float:
    """The times of one layer at growing lengths, which end at about the same one, of all methods that are worth it."""
    return 2500.0 + 6.0 * num_tokens


def heads_work(method: Method, num_tokens: int) -> float:
    """The figures of one layer's heads; without a map's features rows of the matrix are read off column by column."""
    if method.map is not None and method.window is None:
        return 10.0 + 0.15 * num_tokens
    return 0.6 * num_tokens + 2.1e-3 * num_tokens**2
