"""Ctrl-C, noted for a work that looks whether it was pressed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts(*, are_raised: bool = True) -> Iterator[list[int]]:
    """Note Ctrl-C in the list that is yielded: Python swallows what is raised while an object is being destroyed.

    Unless `are_raised` nothing is raised: TensorBoard's queue of events would wait for ever. Where interrupts are
    ignored, as in a shell's background, they stay so.

    Example:
        >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)
        >>> with interrupts(are_raised=False) as pressed:
        ...     signal.raise_signal(signal.SIGINT)
        >>> _ = signal.signal(signal.SIGINT, before)
        >>> pressed == [signal.SIGINT]
        True

    Source: Python's documentation, "Note on Signal Handlers and Exceptions".
    """
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield pressed
        return

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if are_raised:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
