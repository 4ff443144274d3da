"""Plans of an audit: made of its model and length, and measured beside its contenders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linattn.kv_cache.layer_plans import PLAIN, read_memory_plans, write_memory_plans
from linattn.records.texts import Text
from linattn_lab.constant_memory.measuring import MemoryAudit
from linattn_lab.constant_memory.records import PLANNED, PassageRow


def test_a_plan_is_measured_with_the_bytes_and_the_divergence_of_its_layers(tiny, words, tmp_path):
    half = len(words.content) // 2
    other = Text("other half", words.content[half:])
    audit = MemoryAudit(
        tiny("hybrid"), words, [60], num_tokens=128, kinds=(PLAIN, "merged keys, 25% near"), calibration=other
    )
    plan = audit.plan(other, 60)
    assert plan.kl <= plan.window_kl
    assert plan.layers == [2, 4]
    assert sum(plan.budgets) <= 2 * 60
    assert audit.is_of(plan, other)
    assert not audit.is_of(plan, words)
    write_memory_plans(tmp_path / "plan.json", [plan])
    assert read_memory_plans(tmp_path / "plan.json") == [plan]
    audit.take(plan)
    rows = [row for row in audit.rows() if isinstance(row, PassageRow)]
    planned = next(row for row in rows if row.contender == PLANNED)
    assert planned.budget == 60
    assert planned.num_bytes <= 2 * 2 * 60 * 64
    alike = [row for row in rows if row.contender in set(plan.choices)]
    if len(set(plan.choices)) == 1 and alike:
        assert planned.kl == alike[0].kl
    assert audit.header.calibration == "other half"


def test_layers_of_a_plan_have_their_own_bytes(tiny, words):
    """Keys 8 wide, in 2 key/value heads of 2 layers; the audit's own budget is another."""
    audit = MemoryAudit(tiny("hybrid"), words, [50], num_tokens=128, kinds=(PLAIN,))
    plan = audit.plan(words, 50)
    labels = [f"sinks 4 + window {number}" for number in (66, 26)]
    audit.take(replace(plan, choices=[PLAIN, PLAIN], budgets=[70, 30], labels=labels))
    entry = audit.entries[-1]
    assert entry.num_bytes == 2 * (70 + 30) * 64
    assert entry.label == "layer 2: sinks 4 + window 66; layer 4: sinks 4 + window 26"
    with pytest.raises(ValueError, match=r"merged keys in 4 bits: .* give more bytes"):
        audit.take(replace(plan, choices=[PLAIN, "merged keys in 4 bits"], budgets=[90, 2]))
    (row,) = (row for row in audit.rows() if isinstance(row, PassageRow) and row.contender == PLANNED)
    alike = next(row for row in audit.rows() if isinstance(row, PassageRow) and row.contender == PLAIN)
    assert row.num_bytes == alike.num_bytes
    # The first layer sees the exact model's own queries and keys: with more bytes its heads are nearer.
    assert sum(row.errors[0]) < sum(alike.errors[0])
    assert sum(row.errors[1]) > sum(alike.errors[1])
