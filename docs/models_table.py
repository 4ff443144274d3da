"""The table of docs/how_to/which_models.md, from docs/architectures.json (python tests/architecture_uses.py)."""

from __future__ import annotations

import json
from pathlib import Path

from site_tables import table

ARCHITECTURES = Path(__file__).parent / "architectures.json"
KINDS = {
    "decoder": "Decoders",
    "encoder": "Encoders",
    "vision": "Pictures",
    "audio": "Sound",
    "both sides": "An encoder and a decoder",
}
_FORWARD = ("forward", "padding", "batch = alone")
_GENERATION = ("greedy", "beams", "sampling", "left padding", "prompt lookup")
_ENDS = ("small window", "save and load", "restore")
_BOUNDED = (*(f"bounded {use}" for use in _GENERATION), "small budget")


def models_table() -> str:
    """Each architecture, by kind: which of its layers are replaced, and whether each use works, or why none does."""
    rows = json.loads(ARCHITECTURES.read_text(encoding="utf-8"))
    head = ("model", "linearized layers", "forward, padding, batch", "generation", "small window, save, restore")
    parts = []
    for kind, words in KINDS.items():
        found = {name: row for name, row in rows.items() if row["kind"] == kind}
        working = {name: row for name, row in found.items() if not row["linearize_"].startswith("refused")}
        lines = (
            (
                f"{name} (`{row['class']}`)",
                _layers(row),
                *(_cells(row, uses) for uses in (_FORWARD, _GENERATION, _ENDS)),
            )
            for name, row in working.items()
        )
        parts += [f"**{words}**", "", table(head, lines), ""]
        if kind == "decoder":
            parts += [table(("generation from a bounded cache", "bounded layers", "uses"), _bounded(found)), ""]
        refused = [(f"{name} (`{row['class']}`)", _reason(row)) for name, row in found.items() if name not in working]
        if refused:
            parts += [table(("refused at once", "because"), refused), ""]
    return "\n".join(parts).rstrip()


def _bounded(rows: dict[str, dict[str, str]]) -> list[tuple[str, str, str]]:
    """Decoders in groups of those for which a bounded cache does alike."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        is_refused = row["BoundedCache"].startswith("refused")
        cells = (
            ("none", _reason(row, "BoundedCache"))
            if is_refused
            else (_layers(row, "BoundedCache"), _cells(row, _BOUNDED))
        )
        groups.setdefault(cells, []).append(name)
    return [("; ".join(names), *cells) for cells, names in groups.items()]


def _layers(row: dict[str, str], way: str = "linearize_") -> str:
    """How many layers are replaced, or bounded."""
    return row[way].partition(": ")[2].removesuffix(" layers") or "all"


def _cells(row: dict[str, str], uses: tuple[str, ...]) -> str:
    """Of several uses, that they work, or those that are no uses of this model, or what is refused."""
    found = {use: row[use] for use in uses if use in row}
    absent = [use for use, cell in found.items() if cell == "-"]
    refused = [f"{use}: {cell}" for use, cell in found.items() if cell.startswith("refused")]
    if refused:
        return "; ".join(refused)
    if len(absent) == len(found):
        return ""
    names = [use.removeprefix("bounded ") for use in absent]
    return "works" + (f" (softmax has no {', '.join(names)})" if names else "")


def _reason(row: dict[str, str], way: str = "linearize_") -> str:
    """Why no layer is replaced, or bounded, without the model's name, which stands beside it."""
    words = row[way].removeprefix("refused: ")
    reason = (words.partition(": ")[2] or words).removesuffix("; generate without a BoundedCache")
    return reason.replace("|", "&#124;")
