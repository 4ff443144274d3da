"""Docstrings stand alone, and variables are nouns for their quantity."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "linattn"
ROOMS = (
    "feature_maps",
    "positions",
    "nn",
    "parallel",
    "training",
    "records",
    "processes",
    "softmax",
    "kv_cache",
    "attention",
    "methods",
    "hf",
    "convert",
    "cli",
)
LEANING = re.compile(r"(What|Those|The same|Its|As|These|That)\b")
VAGUE = {"found", "kept", "own", "given"}


def nodes(room: str) -> Iterator[tuple[str, ast.AST]]:
    """Each node of a room's files, and the file's path."""
    for path in sorted((SOURCE / room).rglob("*.py")) or [SOURCE / f"{room}.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(SOURCE)), node


def documented(room: str) -> Iterator[tuple[str, str]]:
    """Each docstring of a room, of attributes too, and whose it is."""
    for path, node in nodes(room):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path} {getattr(node, 'name', 'module')}", ast.get_docstring(node) or ""
        if isinstance(node, ast.Module | ast.ClassDef):
            for part in node.body[1:]:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                    yield f"{path}:{part.lineno}", str(part.value.value)


def assigned(room: str) -> Iterator[tuple[str, str]]:
    """Each variable that a room's functions assign to or take, and where."""
    for path, node in nodes(room):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.arg):
            yield place, node.arg
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield place, node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield f"{path}:{part.lineno}", part.id


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_stand_alone(room: str) -> None:
    docstrings = list(documented(room))
    assert docstrings
    assert [(place, text.partition("\n")[0]) for place, text in docstrings if LEANING.match(text)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_variables_name_their_quantity(room: str) -> None:
    names = list(assigned(room))
    assert names
    assert [(place, name) for place, name in names if name in VAGUE] == []
