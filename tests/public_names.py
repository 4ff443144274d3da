"""The public names of all rooms, and those that the pages of the API have."""

from __future__ import annotations

import ast
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

from snippets import ROOT

API = ROOT / "docs" / "api"
SOURCES = (ROOT / "src", ROOT / "lab" / "src")
# Rooms whose names are for the library's own use, as CONTRIBUTING.md says of them.
INNER = {
    "linattn.records",
    "linattn.attention.backends",
    "linattn.attention.backends.blocked",
    "linattn.attention.window",
    "linattn_lab.commands",
    "linattn_lab.experiments",
}


def rooms() -> list[str]:
    """Packages that export names."""
    names = [
        ".".join(path.parent.relative_to(source).parts)
        for source in SOURCES
        for path in sorted(source.glob("linattn*/**/__init__.py"))
    ]
    return [name for name in names if name not in INNER and exported(name)]


def exported(room: str) -> list[str]:
    """The names that a package's file exports by `X as X`, or defines, and that are linattn's own."""
    source = SOURCES[room.startswith("linattn_lab")]
    path = source / Path(*room.split(".")) / "__init__.py"
    names = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in (*tree.body, *(inner for one in tree.body if isinstance(one, ast.If) for inner in one.body)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("linattn"):
            names += [one.asname for one in node.names if one.asname == one.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def documented() -> Counter[str]:
    """The names that the pages ask mkdocstrings for."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in API.glob("*.md"))
    return Counter(re.findall(r"(?m)^::: (\S+)$", text))


def identity(name: str) -> object:
    """What a dotted name stands for; modules and constants by their name in the module that defines them."""
    room, _, last = name.rpartition(".")
    return getattr(import_module(room), last)


ROOMS = rooms()
"""All rooms with public names."""
