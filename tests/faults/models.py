"""Faults of linearized models."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "give every layer the first columns of the mask",
        "hf/_mask.py",
        "mask.allowed[..., -num_keys:]",
        "mask.allowed[..., :num_keys]",
        "tests/hf/test_state_cache.py",
    ),
    Fault(
        "let a module attend without the state that took its keys",
        "hf/state_cache.py",
        "self._is_expected = False\n        if self._is_pending:",
        "self._is_expected = False\n        if False:",
        "tests/hf/test_state_cache.py",
    ),
)
