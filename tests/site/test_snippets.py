"""Every block of Python on the site runs, and every command on it is one that linattn has."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import linattn.hf
from linattn.cli.app import app, subcommands
from linattn.feature_maps import FEATURE_MAPS, WRAPPERS
from linattn.methods.method import parse_method
from public_names import ROOMS, exported, identity
from snippets import ROOT, fences, inline, pages, python_blocks, run

PUBLIC = {name: identity(f"{room}.{name}") for room in ROOMS for name in exported(room)}
# A map's name with options or a part beside it, or a part with its number.
WRITTEN = re.compile(rf"({'|'.join((*FEATURE_MAPS, *WRAPPERS))})(\(| \+ )|(window|merged) \d")
WITH_CODE = [page for page in pages() if python_blocks(page)]


def name_of(page: Path) -> str:
    """A page in a test's name."""
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files go to a folder of the test."""
    monkeypatch.chdir(tmp_path)


def a_language_model() -> dict[str, Any]:
    """What README.md has of transformers."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
    return {"model": model, "inputs": {"input_ids": torch.tensor([[5, 7, 9]])}}


GIVEN = {"README.md": a_language_model}


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(page, **GIVEN.get(name_of(page), dict)())
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
    assert names["trained"].test.bits < names["trained"].frequency_bits
    assert isinstance(names["model"], linattn.hf.LinearLMForCausalLM)


CHECKS = {
    "docs/quickstart.md": the_six_lines_equal_the_op,
    "docs/tutorials/linearize.md": layer_0_is_kept_and_all_comes_back,
    "docs/tutorials/train.md": bytes_are_learned,
}


def test_pages_with_code_are_found() -> None:
    assert len(WITH_CODE) > 10
    assert {ROOT / "README.md", *(ROOT / page for page in CHECKS)} <= set(WITH_CODE)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_code_that_is_not_run_is_no_python(page: Path) -> None:
    """A block is Python, and run, or says what else it is."""
    for kind, text in fences(page):
        assert kind in ("python", "sh", "text"), text
        if kind != "python":
            with pytest.raises(SyntaxError):
                compile(text, page.name, "exec")


def called(code: str) -> tuple[Any, inspect.BoundArguments] | None:
    """What a sentence's call calls, and its arguments; None for no call of a name that linattn exports."""
    try:
        node = ast.parse(code.replace("…", "..."), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(node, ast.Call):
        return None
    owner = PUBLIC.get(ast.unparse(node.func).split(".")[-1])
    if owner is None:
        return None
    options = {str(option.arg): option.value for option in node.keywords}
    return owner, inspect.signature(owner).bind_partial(*node.args, **options)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_calls_in_sentences_have_the_options_that_are_written(page: Path) -> None:
    for code in inline(page):
        call = called(code)
        if call is not None and call[0] is linattn.MergedKV:
            eval(code, {"MergedKV": linattn.MergedKV, "linattn": linattn})


def test_calls_in_sentences_are_found() -> None:
    found = [code for page in pages() for code in inline(page) if called(code)]
    assert {"linearize_(…, calibrate=batches)", "linattn.MergedKV(64, 512, 4)"} <= set(found)
    with pytest.raises(TypeError):
        called("linearize_(model, rule=3)")


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_written_forms_in_sentences_are_read(page: Path) -> None:
    for code in inline(page):
        form = code.strip('"')
        if WRITTEN.match(form):
            parse_method(form)


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
        assert words[1] in subcommands(), command
        asked = {word for word in words[2:] if word.startswith("--")}
        assert asked <= options(words[1]), command
