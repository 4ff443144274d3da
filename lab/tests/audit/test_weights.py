"""The attention rows that an audit keeps: of few heads and queries, added up, rounded, and read back as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from linattn.hf import capture, load
from linattn.methods.method import parse_method
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AUDIT, HeadRow, WeightsRow
from linattn_lab.audit.weights import CELLS, LETTERS, STEPS, explored_heads, few_queries, weights_row
from linattn_lab.report.audit.explorer import explorer
from linattn_lab.report.audit.summary import summarise_audit
from linattn_lab.texts import Text


def read(text, cells=CELLS):
    """Weights of a text."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in text], dtype=torch.float64).view(-1, cells + 1)
    steps = numbers[:, 1:] - STEPS
    return (steps.sign() * (steps / STEPS).square() * 2 ** -numbers[:, :1]).flatten()


def test_weights_are_rounded_by_less_than_said():
    """Half a step of √w at w = 1: 1 - (1 - 1/62)² = 0.032; signs are kept, and beyond 1 is 1."""
    weights = torch.linspace(-1.2, 1.2, CELLS, dtype=torch.float64)
    found = read(weights_row("exact", None, 0, [0], [3], weights[None, None]).rows[0])
    assert float((found - weights.clamp(-1, 1)).abs().max()) <= 0.033
    assert found.sign().equal(weights.sign())
    small = torch.rand(1, 4, CELLS, dtype=torch.float64) * torch.tensor([1.0, 0.1, 1e-3, 0.0])[:, None]
    off = read(weights_row("exact", None, 0, [0], [3], small).rows[0]).view(4, CELLS) - small[0]
    assert bool((off.abs() <= small[0].amax(-1, keepdim=True) / 15).all())


def test_neighbours_are_added_up():
    weights = torch.zeros(2, 3, 4 * CELLS + 7)
    weights[1, 2, 5] = 0.25
    weights[1, 2, 6] = 0.75
    (text,) = weights_row("Relu", 8, 0, [1], [1, 2, 3], weights).rows
    assert read(text).nonzero().flatten().tolist() == [2 * CELLS + 1]
    assert read(text).sum() == 1


def test_heads_and_queries_are_spread_evenly():
    assert explored_heads([3, 2]) == [[0, 1, 2], [0, 1]]
    many = explored_heads([16] * 24)
    assert sum(map(len, many)) == 72
    assert all(many)
    assert [few_queries(count) for count in (128, 4, 3, 1)] == [[41, 84, 127], [0, 1, 3], [0, 1, 2], [0]]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_an_audit_keeps_the_rows_of_each_layer_once(folder, prose, family):
    wanted = AuditGrid((parse_method("FavorPlus"), parse_method("EluPlusOne")), (8,), draws=2)
    loaded = load(folder(family))
    audit = Audit(loaded, Text("words", prose), wanted, num_tokens=32)
    rows = list(audit.rows())
    kept = [row for row in rows if isinstance(row, WeightsRow)]
    assert [(row.map, row.layer) for row in kept] == [
        (name, layer) for name in ("exact", "FavorPlus", "EluPlusOne") for layer in (0, 1)
    ]
    calls = capture(loaded.model, loaded.encode(prose, 32)).calls
    for row, call in zip(kept, calls, strict=False):
        query, key = (x.double() for x in (call.query, call.key.repeat_interleave(4 // call.key.shape[1], 1)))
        logits = call.scale * query @ key.mT
        if call.is_causal:
            logits = logits.masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), -torch.inf)
        exact = logits.softmax(-1)[0][:, list(row.queries)].flatten(1)
        assert row.heads == (0, 1, 2, 3)
        for text, weights in zip(row.rows, exact, strict=True):
            assert float((read(text, 32) - weights).abs().max()) <= 0.033
    # An early end: of the second method the first layer's heads are there, and its rows are not.
    heads = [row for row in rows if isinstance(row, HeadRow) and (row.map, row.layer) == ("EluPlusOne", 0)]
    began = rows[: rows.index(kept[4])] + heads
    again = [row for row in audit.rows(audit.kept(began)) if isinstance(row, HeadRow | WeightsRow)]
    assert [type(row) for row in again] == [WeightsRow, WeightsRow] + [HeadRow] * 4
    assert again[:2] == kept[4:]


def test_the_explorer_has_the_methods_whose_rows_are_there(folder, prose, tmp_path):
    wanted = AuditGrid(tuple(map(parse_method, ("Relu", "EluPlusOne"))), (8,))
    audit = Audit(load(folder("bert")), Text("words", prose), wanted, num_tokens=32)
    rows, path = list(audit.rows()), tmp_path / "audit.jsonl"

    def summary_of(rows):
        AUDIT.write(path, audit.header, rows)
        return summarise_audit(path)

    found = explorer(summary_of(rows))
    assert [method.name for method in found.methods] == ["Relu (8 features)", "EluPlusOne (8 features)"]
    assert (found.tokens, found.cells, found.exact_bytes, len(found.heads)) == (32, 32, 4 * 32 * 16, 8)
    line = summary_of(rows).lines[0]
    assert found.methods[0].bytes == 4 * line.state_numbers
    assert sum(found.methods[0].errors) / 8 == pytest.approx(line.error.mean, abs=1e-4)
    lost = next(row for row in rows if isinstance(row, WeightsRow) and row.map == "Relu")
    assert [method.name for method in explorer(summary_of([row for row in rows if row != lost])).methods] == [
        "EluPlusOne (8 features)"
    ]
    assert explorer(summary_of([row for row in rows if not isinstance(row, WeightsRow)])) is None
    short = [replace(row, rows=("A",) * 4) if row == lost else row for row in rows]
    with pytest.raises(ValueError, match=r"the attention rows of Relu \(8 features\) are not those of the heads"):
        summary_of(short)
