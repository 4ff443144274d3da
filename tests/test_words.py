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
    for path in sorted((SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(SOURCE)), node


def documented(room: str) -> Iterator[tuple[str, str]]:
    """Each docstring of a room, and whose it is."""
    for path, node in nodes(room):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path} {getattr(node, 'name', 'module')}", ast.get_docstring(node) or ""


def assigned(room: str) -> Iterator[tuple[str, str]]:
    """Each variable that a room's functions assign to, and where."""
    for path, function in nodes(room):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield f"{path}:{node.lineno}", node.id


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
