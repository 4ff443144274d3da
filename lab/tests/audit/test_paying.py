"""When a method pays: which are timed, at which lengths, and what is measured of the whole model."""

from __future__ import annotations

import pytest
import torch

from linattn.hf import AttentionCall, load
from linattn.methods.method import parse_method
from linattn_lab.audit import paying
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import HeadRow, LengthsRow, TimeRow
from linattn_lab.texts import Text


@pytest.fixture
def call():
    """One layer's attention to 100 tokens, the second half of which is masked."""
    tokens = torch.randn(3, 1, 2, 100, 4, generator=torch.Generator().manual_seed(0))
    return AttentionCall(0, "a", *tokens, torch.arange(100)[None] < 50, False, 0.5)


@pytest.mark.parametrize(
    ("linear", "exact", "lengths"),
    [
        # 1e-4·L against 1e-7·L²: equal at 1,000.
        (1e-4, 1e-7, (100, 200, 400, 800, 1_600)),
        (1e-6, 1e-7, (100,)),
        # Never faster: the next call of exact attention would take 1e-5·800² > 2 seconds.
        (1.0, 1e-5, (100, 200, 400)),
        (1.0, 1e-12, tuple(100 << power for power in range(10))),
    ],
)
def test_lengths_double_until_the_method_is_faster(call, monkeypatch, linear, exact, lengths):
    seen = []

    def seconds(contenders, *, repeats):
        """Times of a machine on which linear attention takes linear time."""
        for run in contenders.values():
            run()
        return {"linear": [linear * seen[-1]] * repeats, "exact": [exact * seen[-1] ** 2] * repeats}

    def answer(longer):
        """Checks what is attended to."""
        seen.append(longer.query.shape[2])
        assert longer.key.shape == longer.value.shape == longer.query.shape
        assert longer.key_mask is None
        assert longer.key[:, :, -1].equal(call.key[:, :, (seen[-1] - 1) % 100])
        return longer.query

    monkeypatch.setattr(paying, "seconds", seconds)
    monkeypatch.setattr(paying, "_MOST_TOKENS", 65_536)
    monkeypatch.setattr(AttentionCall, "softmax", lambda self: self.query)
    row = paying.time_lengths("Relu", 4, answer, call)
    assert row.lengths == tuple(seen) == lengths
    assert row.seconds == tuple(linear * length for length in lengths)
    assert row.exact_seconds == tuple(exact * length**2 for length in lengths)


@pytest.mark.parametrize(("first", "repeats"), [(0.01, 3), (2.0, 1)])
def test_a_long_pass_is_timed_once(monkeypatch, first, repeats):
    asked = []

    def seconds(contenders, *, repeats):
        """Notes how often."""
        asked.append(repeats)
        return {name: [first] * repeats for name in contenders}

    monkeypatch.setattr(paying, "seconds", seconds)
    assert paying.time_model(lambda: None, lambda: None) == ((first,) * repeats, (first,) * repeats)
    assert asked == [1, repeats]


def test_only_methods_that_no_other_beats_are_worth_timing():
    """Neither one that is slower and worse, nor one that averaging beats, nor one whose error is not finite."""

    def rows(name, error, seconds):
        """A method on one head, where averaging has 0.8."""
        head = HeadRow(0, 0, name, 4, 0, None, error, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None, 6, 20)
        return [head, TimeRow(name, 4, (seconds,), (1.0,), 1)]

    found = [*rows("good", 0.2, 2.0), *rows("fast", 0.5, 1.0), *rows("beaten", 0.4, 3.0), *rows("idle", 0.79, 0.1)]
    found += rows("broken", float("nan"), 0.1)
    assert paying.worth_timing(found) == [("fast", 4), ("good", 4)]


def test_an_audit_times_every_method_once_and_the_best_at_growing_lengths(folder, prose):
    """One row per method and width whatever the draws; what was timed before is not timed again."""
    wanted = AuditGrid((parse_method("FavorPlus"), parse_method("Expansion(num_centres=4)")), (8, 16), draws=2)
    audit = Audit(load(folder("bert")), Text("words", prose), wanted, num_tokens=48)
    rows = list(audit.rows())
    times = [row for row in rows if isinstance(row, TimeRow)]
    widths = {(row.map, row.features) for row in rows if isinstance(row, HeadRow)}
    assert sorted((row.map, row.features) for row in times) == sorted(widths)
    assert len(widths) == 3
    assert all(len(row.seconds) == len(row.exact_seconds) > 0 < min(row.seconds) for row in times)
    lengths = [row for row in rows if isinstance(row, LengthsRow)]
    assert [(row.map, row.features) for row in lengths] == paying.worth_timing(rows)
    assert {row.map for row in lengths} >= {"Expansion(num_centres=4)"}
    assert all(row.lengths[0] == 48 for row in lengths)
    first_of_each = [row for row in rows if not isinstance(row, LengthsRow)]
    again = list(audit.rows(audit.kept(first_of_each)))
    assert {type(row) for row in again} == {LengthsRow}
    assert list(audit.rows(audit.kept(rows))) == []
