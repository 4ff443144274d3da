"""The README's code runs, its six lines are what the op computes, and a model of transformers comes back as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import linattn.hf.linearization

README = Path(__file__).parents[1] / "README.md"


def blocks() -> list[str]:
    """The README's code: how the op is used, what it equals, and a model of transformers."""
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_code_runs_and_the_six_lines_equal_the_op() -> None:
    use, equivalent, _ = blocks()
    names: dict[str, Any] = {}
    exec(use, names)
    names |= {name: names[name][:, :, :200] / 4 for name in "qkv"}
    exec(equivalent, names)
    expected = linattn.linear_attention(names["q"], names["k"], names["v"], names["favor"])
    # float32 exponents of a few units, summed over 200 keys.
    torch.testing.assert_close(names["out"], expected, rtol=1e-4, atol=1e-5)


def test_a_linearized_model_generates_and_comes_back(capsys, monkeypatch, tmp_path) -> None:
    *_, model_code = blocks()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch}
    exec(model_code, names)
    printed = capsys.readouterr().out
    assert "transformer.h.0.attn: softmax (not among `layers`)" in printed
    assert "transformer.h.1.attn: FavorPlus" in printed
    assert not linattn.hf.linearization.is_linearized(names["model"])


def test_every_table_has_figures() -> None:
    """Figures are written by docs/write_tables.py; an empty table would be a place-holder."""
    tables = re.findall(r"<!-- \w+ -->\n(.*?)<!-- end -->", README.read_text(), re.DOTALL)
    assert len(tables) == 5
    assert all(re.search(r"\d", table) for table in tables)
