"""Timing: who is called when, and what is made of the samples; never how long anything took."""

from __future__ import annotations

import pytest

from linattn.methods.measures import seconds


def test_contenders_take_turns_after_a_warm_up_each():
    calls = []
    found = seconds({name: lambda name=name: calls.append(name) for name in "abc"}, repeats=4)
    assert "".join(calls) == "abc" * 5
    assert {name: len(samples) for name, samples in found.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(sample >= 0 for samples in found.values() for sample in samples)


def test_the_warm_up_is_not_counted(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("linattn.methods.measures.time.perf_counter", lambda: float(next(clock)))
    advance = iter([50, 3, 5])
    found = seconds({"a": lambda: [next(clock) for _ in range(next(advance))]}, repeats=2)
    assert found == {"a": [4.0, 6.0]}


def test_rehearsals_are_not_counted(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("linattn.methods.measures.time.perf_counter", lambda: float(next(clock)))
    advance = iter([50, 7, 3, 9, 5])
    found = seconds({"a": lambda: [next(clock) for _ in range(next(advance))]}, repeats=2, rehearse=True)
    assert found == {"a": [4.0, 6.0]}


def test_nothing_to_time():
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        seconds({"a": lambda: None}, repeats=0)
