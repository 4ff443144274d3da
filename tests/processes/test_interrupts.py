"""Ctrl-C: noted and raised, unless a shell has started the process in the background."""

from __future__ import annotations

import doctest
import signal

import pytest

from linattn import processes
from linattn.processes import interrupts


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_noted_and_raised():
    with pytest.raises(KeyboardInterrupt), interrupts() as pressed:
        signal.raise_signal(signal.SIGINT)
    assert pressed == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_ignored_interrupts_stay_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts() as pressed:
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pytest.fail("an ignored interrupt was raised")
    assert pressed == []
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("interruptible")
def test_the_example_of_waiting_interrupts_holds_where_they_are_ignored():
    """As in `make test &`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (example,) = doctest.DocTestFinder(recurse=False).find(interrupts, "interrupts", processes)
    assert doctest.DocTestRunner().run(example).failed == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
