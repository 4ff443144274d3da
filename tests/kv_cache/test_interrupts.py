"""Calls in compiled code that are interrupted: what threads still write to is theirs until they end."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import linattn
from linattn import MergedKV
from linattn.kv_cache import compiled
from merged_rows import given

pytest.importorskip("linattn_compiled")


class Interrupted(ThreadPoolExecutor):
    """Threads whose results nobody awaits: one interrupt ends the wait for them, and one the wait for their end."""

    def map(self, *arguments: object, **_: object) -> None:
        """Begin, and be interrupted."""
        super().map(*arguments)
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        """Be interrupted once more."""
        self.shutdown(wait=False)
        raise KeyboardInterrupt


@pytest.mark.parametrize(("run", "is_causal"), [("merge_stream", True), ("merge_everywhere", False)])
def test_memory_outlives_a_call_that_is_interrupted_twice(
    run: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads write their rows to their end: into memory of others, if nothing held it."""
    begun, may_end, rows, room = threading.Event(), threading.Event(), [], compiled._room

    def watched(*arguments: object, **options: object) -> object:
        reading = room(*arguments, **options)
        rows.append(weakref.ref(reading.out))
        return reading

    monkeypatch.setattr(f"linattn_compiled.{run}", lambda *_: (begun.set(), may_end.wait(60)))
    for name, stand_in in (("_room", watched), ("_MANY", 0), ("ThreadPoolExecutor", Interrupted)):
        monkeypatch.setattr(compiled, name, stand_in)
    config = MergedKV(16, 40, bits=None, num_sinks=0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    # No `pytest.raises`: what it tells of the error would hold the call's frames.
    was_interrupted = False
    try:
        linattn.merged_attention(*given(), config, is_causal=is_causal, backend="compiled")
    except KeyboardInterrupt:
        was_interrupted = True
    assert begun.wait(60)
    is_held = rows[0]() is not None
    may_end.set()
    assert was_interrupted
    assert is_held
