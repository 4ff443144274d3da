"""Every block of Python on the site runs, and every command on it is one that linattn has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import linattn.hf
from linattn.attention.exact import rule
from linattn.lab.commands.app import COMMANDS, app
from snippets import ROOT, pages, python_blocks, run

WITH_CODE = [page for page in pages() if python_blocks(page)]


def name_of(page: Path) -> str:
    """A page in a test's name."""
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files go to a folder of the test, and rules of eviction that a page defines end with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rule, "RULES", dict(rule.RULES))


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(page)
    CHECKS.get(name_of(page), lambda *_: None)(names, capsys.readouterr().out)


def the_six_lines_equal_the_op(names: dict[str, Any], printed: str) -> None:
    """Of the quickstart: run anew on fewer and shorter tokens."""
    names |= {name: names[name][:, :, :200] / 4 for name in "qkv"}
    exec(python_blocks(ROOT / "docs" / "quickstart.md")[1], names)
    expected = linattn.linear_attention(names["q"], names["k"], names["v"], names["favor"])
    # float32 exponents of a few units, summed over 200 keys.
    torch.testing.assert_close(names["out"], expected, rtol=1e-4, atol=1e-5)


def layer_0_is_kept_and_all_comes_back(names: dict[str, Any], printed: str) -> None:
    """Of the tutorial on linearizing."""
    assert "transformer.h.0.attn: softmax (not among `layers`)" in printed
    assert "transformer.h.1.attn: FavorPlus" in printed
    assert not linattn.hf.is_linearized(names["model"])


def bytes_are_learned(names: dict[str, Any], printed: str) -> None:
    """Of the tutorial on training."""
    assert names["found"].test.bits < names["found"].frequency_bits
    assert isinstance(names["model"], linattn.hf.LinearLMForCausalLM)


CHECKS = {
    "docs/quickstart.md": the_six_lines_equal_the_op,
    "docs/tutorials/linearize.md": layer_0_is_kept_and_all_comes_back,
    "docs/tutorials/train.md": bytes_are_learned,
}


def test_pages_with_code_are_found() -> None:
    assert len(WITH_CODE) > 10
    assert {ROOT / "README.md", *(ROOT / page for page in CHECKS)} <= set(WITH_CODE)


def commands(page: Path) -> list[str]:
    """The commands of a page: lines of code that begin with linattn, and such words in a sentence."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"(?m)^    (linattn .*)$", text) + re.findall(r"`(linattn (?!--)[^`]+)`", text)


def options(command: str) -> set[str]:
    """The long options that a subcommand has."""
    click_command = typer.main.get_command(app).get_command(None, command)
    return {name for one in click_command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", [page for page in pages() if commands(page)], ids=name_of)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(re.sub(r"[\[\]|…]", " ", command))
        assert words[1] in COMMANDS, command
        asked = {word for word in words[2:] if word.startswith("--")}
        assert asked <= options(words[1]), command
