"""The most that a call allocates, as torch's profiler counts it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile

# File descriptor of the standard error.
_ERRORS = 2


def peak_bytes(run: Callable[[], object]) -> int:
    """The largest sum of what a call has allocated and not freed, at any moment, on the CPU.

        max_t Σ_{events until t} bytes,   frees negative

    What was allocated before the call and is freed by it does not count. Cost: the call's, and about as much again for
    every few ten thousand allocations.

    Source: torch.profiler's memory events.
    """
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    del result
    # The results as they are: of a trace in JSON most of the time goes into events that are none of memory.
    results = profiled.profiler.kineto_results
    memory = [event for event in results.events() if event.name() == "[memory]"]
    return highest([event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())])


def highest(changes: Sequence[int]) -> int:
    """The largest partial sum of changes, at least 0.

    Example:
        >>> highest([4, 4, -8, 6]), highest([-4, 2])
        (8, 0)
    """
    return max(accumulate(changes, initial=0))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that torch's profiler writes to the standard error, whatever its log level, as it begins."""
    former, nothing = os.dup(_ERRORS), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, _ERRORS)
        yield
    finally:
        os.dup2(former, _ERRORS)
        os.close(former)
        os.close(nothing)
