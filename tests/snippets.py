"""The code of a page of Markdown, and how it is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def python_blocks(page: Path) -> list[str]:
    """A page's blocks of Python, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def fences(page: Path) -> list[tuple[str, str]]:
    """What a page's blocks are said to be, and their text."""
    return re.findall(r"^ *```([^\n`]*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def inline(page: Path) -> list[str]:
    """The code in a page's sentences and tables."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def run(page: Path, **given: Any) -> dict[str, Any]:
    """Run a page's blocks in order, as one program, from names that it is given; the names it leaves."""
    names: dict[str, Any] = {"__name__": "__main__", **given}
    for number, block in enumerate(python_blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    return names


def pages() -> list[Path]:
    """README.md and the pages of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
