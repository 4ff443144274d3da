"""Memory figures of child processes (Linux): known allocations are found, whatever was freed before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from linattn_lab.bench import memory
from linattn_lab.bench.settings import Settings

SETTINGS = Settings(lengths=(2048,), heads=4, head_dim=32, features=64)
# 64 MB filled and freed before: an allocator that kept them would hide the next 64. Then buffers that are filled, one
# that is freed before the peak, with another after it in the heap, and one that is kept as the result.
KNOWN = """
import torch
from linattn_lab.bench.memory import extra_peak
torch.set_num_threads(1)
def fill(megabytes):
    return torch.ones(megabytes * 1_000_000 // 4)
fill(64)
def freed_before_the_peak():
    first = fill(16)
    after_it = fill(6)
    del first
    return fill(64), after_it
def freed_after_the_peak():
    kept = fill(16)
    fill(64)
    return kept
print(extra_peak(lambda: None), extra_peak(lambda: fill(64)), extra_peak(freed_before_the_peak),
      extra_peak(freed_after_the_peak))
"""


def test_known_buffers_are_found():
    environment = {**os.environ, **memory.CHILD_SETTINGS}
    done = subprocess.run([sys.executable, "-c", KNOWN], capture_output=True, text=True, check=True, env=environment)
    found = [int(word) / 1e6 for word in done.stdout.split()]
    # What the kernel counts is exact to some pages per core.
    assert found == pytest.approx([0, 64, 70, 80], abs=2)


def test_both_contenders():
    results = 4 * 2048 * 32 * 4
    linear, exact = (memory.measure(SETTINGS, 2048, contender) for contender in ("linear", "exact"))
    for found in (linear, exact):
        assert results - 5e5 < found < results + 30e6


def test_a_process_that_fails(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="memory of exact attention at 2,048 tokens ended with 1: it said nothing"):
        memory.measure(SETTINGS, 2048, "exact")
