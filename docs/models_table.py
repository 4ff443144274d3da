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
_ENDS = ("small budget", "save and load", "restore")


def models_table() -> str:
    """Each architecture, by kind: which of its layers are replaced, and whether each use works, or why none does."""
    rows = json.loads(ARCHITECTURES.read_text(encoding="utf-8"))
    head = ("model", "layers", "forward, padding, batch", "generation", "small budget, save, restore")
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
        refused = [(f"{name} (`{row['class']}`)", _reason(row)) for name, row in found.items() if name not in working]
        if refused:
            parts += [table(("refused at once", "because"), refused), ""]
    return "\n".join(parts).rstrip()


def _layers(row: dict[str, str]) -> str:
    """How many layers are replaced."""
    return row["linearize_"].partition(": ")[2].removesuffix(" layers") or "all"


def _cells(row: dict[str, str], uses: tuple[str, ...]) -> str:
    """Of several uses, that they work, or those that are no uses of this model, or what is refused."""
    found = {use: row[use] for use in uses if use in row}
    absent = [use for use, cell in found.items() if cell == "-"]
    refused = [f"{use}: {cell}" for use, cell in found.items() if cell.startswith("refused")]
    if refused:
        return "; ".join(refused)
    if len(absent) == len(found):
        return ""
    return "works" + (f" (softmax has no {', '.join(absent)})" if absent else "")


def _reason(row: dict[str, str]) -> str:
    """Why no layer is replaced, without the model's name, which stands beside it."""
    words = row["linearize_"].removeprefix("refused: ")
    return words.partition(": ")[2].replace("|", "&#124;")
