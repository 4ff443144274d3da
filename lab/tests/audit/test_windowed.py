"""Audits of models some of whose layers have a sliding window: these are left alone, as `linearize_` leaves them."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from linattn.cli.app import app
from linattn.hf import capture, intercept, linearize_, load
from linattn.methods.measures import cosine, relative_error
from linattn_lab.audit.records import AUDIT, HeadRow, ModelRow
from linattn_lab.report.audit.advice import advise
from linattn_lab.report.audit.summary import summarise_audit

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
NAMES = [f"layers.{number}.self_attn" for number in range(3)]


@pytest.mark.parametrize("width", [8, 64], ids=["active", "longer than the text"])
def test_only_layers_that_see_everything_are_audited(folder, prose, tmp_path, width):
    where, text, out = folder(f"window of {width}"), tmp_path / "text.txt", tmp_path / "out"
    text.write_text(prose, encoding="utf-8")
    words = ["--text", text, "--map", "EluPlusOne", "--tokens", "32", "--out", out]
    result = CliRunner(env=WIDE).invoke(app, ["audit", str(where), *map(str, words)])
    assert result.exit_code == 0, result.output
    assert "within a sliding window, in linear time already: 2 layers. Audited: 1." in result.output
    header, rows = AUDIT.read(out / "audit.jsonl")
    assert (header.num_layers, header.layers, header.windowed) == (1, [1], [NAMES[0], NAMES[2]])
    # The figures are of the middle layer, in a model whose other layers are its own.
    loaded = load(where)
    inputs = loaded.encode(prose, 32)
    recorded = capture(loaded.model, inputs)
    call = next(call for call in recorded.calls if call.module_name == NAMES[1])
    errors = relative_error(call.uniform()[:, :, 16:].double(), call.softmax()[:, :, 16:].double())
    measured = [row.uniform_error for row in rows if isinstance(row, HeadRow)]
    torch.testing.assert_close(torch.tensor(measured, dtype=torch.float64), errors, rtol=1e-5, atol=0)
    answer = lambda call: call.uniform() if call.module_name == NAMES[1] else call.softmax()  # noqa: E731
    with torch.no_grad(), intercept(loaded.model, answer):
        output = loaded.model(**inputs)[0]
    uniform = next(row for row in rows if isinstance(row, ModelRow) and row.map == "uniform")
    expected = cosine(output[0, 16:].double(), recorded.output[0, 16:].double()).mean()
    assert uniform.token_cosine == pytest.approx(float(expected), rel=1e-6)
    # Audited are the layers that linearize_ replaces; reports name them by their number in the model.
    report = linearize_(loaded.model, method="EluPlusOne")
    assert [row.layer for row in report.replaced] == [1]
    summary = summarise_audit(out / "audit.jsonl")
    named = " ".join(point.text for point in advise(summary).doubts)
    assert "layer 0" not in named
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "within a sliding window: 2 more layers." in page
