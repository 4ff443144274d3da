"""Files stay under 400 lines, functions under 60 (docstrings apart): what a newcomer can hold in mind."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def sources() -> list[Path]:
    """All Python files of the project."""
    return [
        path for room in ("src", "lab", "gpu", "tests", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))
    ]


def function_lengths(path: Path) -> list[tuple[int, str]]:
    """Lines of each function without its docstring."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            prose = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            length = (node.end_lineno or 0) - node.lineno + 1 - prose
            found.append((length, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def five_largest(rows: list[tuple[int, str]]) -> str:
    """The top of the list, one row a line."""
    return "\n".join(f"{length:5d}  {name}" for length, name in sorted(rows, reverse=True)[:5])


def test_files_and_functions_are_small(capsys) -> None:
    files = [(len(path.read_text().splitlines()), str(path.relative_to(ROOT))) for path in sources()]
    functions = [row for path in sources() for row in function_lengths(path)]
    assert len(files) > 10
    with capsys.disabled():
        sys.stdout.write(f"\nlargest files\n{five_largest(files)}\nlargest functions\n{five_largest(functions)}\n")
    assert max(files)[0] <= LONGEST_FILE
    assert max(functions)[0] <= LONGEST_FUNCTION
