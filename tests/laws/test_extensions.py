"""Packages of faster code beside the library's: without one, or with another interface, a named backend says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import linattn
from grid import build, qkv
from linattn.softmax.extensions import EXTENSIONS, missing

BACKENDS = {"linattn_compiled": "compiled", "linattn_triton": "triton"}


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    missing.cache_clear()
    yield
    missing.cache_clear()


@pytest.mark.parametrize("package", EXTENSIONS)
def test_without_the_package_a_named_backend_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """And "auto" runs plain torch."""
    monkeypatch.setitem(sys.modules, package, None)
    feature_map, token = build("FavorPlus"), tuple(x[:, :, :1] for x in qkv(dtype=torch.float32))
    remedy = rf"pip install -U 'linattn\[{EXTENSIONS[package].extra}\]', in a clone ./{EXTENSIONS[package].extra}"
    with pytest.raises(ValueError, match=rf"{package.replace('_', '-')} is not installed \({remedy}\)"):
        linattn.linear_attention_with_state(*token, feature_map, enable_gqa=True, backend=BACKENDS[package])
    if package == "linattn_compiled":
        ours, theirs = (
            linattn.linear_attention_with_state(*token, feature_map, enable_gqa=True, backend=backend).out
            for backend in ("auto", "blocked")
        )
        assert torch.equal(ours, theirs)


def test_without_the_kernels_a_graph_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "linattn_triton", None)
    feature_map, tokens = build("FavorPlus"), qkv(dtype=torch.float32)

    def attend(*tokens: torch.Tensor) -> torch.Tensor:
        return linattn.linear_attention(*tokens, feature_map, enable_gqa=True, backend="triton")

    with pytest.raises(Exception, match=r"linattn-triton is not installed"):
        torch.compile(attend, backend="eager")(*tokens)


def test_a_package_that_misses_another_is_not_called_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "linattn_compiled.py").write_text("import linattn.is_elsewhere\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "linattn_compiled", raising=False)
    assert missing("linattn_compiled") == "linattn-compiled cannot be loaded: No module named 'linattn.is_elsewhere'"


@pytest.mark.parametrize("package", EXTENSIONS)
def test_a_folder_that_an_uninstall_left_is_no_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert "has interface None" in missing(package)


@pytest.mark.parametrize("package", EXTENSIONS)
def test_a_package_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    other = ModuleType(package)
    other.INTERFACE = 0
    monkeypatch.setitem(sys.modules, package, other)
    name, wanted = package.replace("_", "-"), EXTENSIONS[package].interface
    assert missing(package).startswith(f"{name} has interface 0, wanted {wanted} (pip install -U 'linattn[")


@pytest.mark.parametrize("package", EXTENSIONS)
def test_a_package_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    def broken(name: str) -> ModuleType:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr("linattn.softmax.extensions.import_module", broken)
    assert missing(package) == f"{package.replace('_', '-')} cannot be loaded: {package}: undefined symbol"
