"""An audit's estimate of its time: what a short text does not shorten is in it."""

from __future__ import annotations

import pytest

from linattn.methods.method import parse_method
from linattn_lab.audit.grid import SHORT_METHODS
from linattn_lab.audit.work import exact_work, heads_work, lengths_work, pass_work, timed_work

LAYERS = 6
# Seconds of one core for the short grid on all-MiniLM-L6-v2, by tokens; under load they differ by tens of percent.
MEASURED = {64: 7.8, 128: 9.6, 256: 17.5, 512: 41.4}


def seconds(num_tokens: int) -> float:
    """The estimate of the short grid, at the speed of the core that was measured."""
    methods = [parse_method(one) for one in SHORT_METHODS]
    layer = sum(heads_work(method, num_tokens) for method in methods)
    layer += len(methods) * (timed_work(num_tokens) + pass_work(num_tokens))
    return (LAYERS * layer + lengths_work(num_tokens)) / 1e3


@pytest.mark.parametrize("num_tokens", MEASURED)
def test_an_estimate_is_within_half_of_what_was_measured(num_tokens: int) -> None:
    assert MEASURED[num_tokens] / 1.5 <= seconds(num_tokens) <= 1.5 * MEASURED[num_tokens]


def test_the_parts_do_not_grow_as_the_exact_answers_do() -> None:
    """Scaling all of them by the time of the exact answers would be short for short texts."""
    assert seconds(64) / seconds(512) > 2 * exact_work(64) / exact_work(512)
