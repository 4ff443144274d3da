"""The tables of docs/how_to/which_models.md, from docs/architectures.json (python tests/architecture_uses.py)."""

from __future__ import annotations

import json
from pathlib import Path

from site_tables import table

ARCHITECTURES = Path(__file__).parent / "architectures.json"
DECODER = "decoder"
# Kinds whose layers `linearize_` alone replaces, and their headings.
OTHERS = {
    "encoder": "Text encoders",
    "vision": "Vision encoders",
    "audio": "Audio encoders",
    "both sides": "Encoder-decoders",
}
_LINEARIZE, _BOUND = "linearize_", "BoundedCache"
# Fields of a row that are no uses.
_ABOUT = {"class", "kind", _LINEARIZE, _BOUND}

Row = dict[str, str]


def models_table() -> str:
    """Each architecture by kind and name: layers that are bounded or replaced, uses that work, reasons of a refusal."""
    rows = dict(sorted(json.loads(ARCHITECTURES.read_text(encoding="utf-8")).items(), key=lambda row: row[0].lower()))
    decoders = {name: row for name, row in rows.items() if row["kind"] == DECODER}
    head = ("model", "class", "`BoundedCache` bounds", "`linearize_` replaces", "uses")
    parts = [
        "### Decoders",
        _counted(decoders),
        table(head, (_named(name, row, (_BOUND, _LINEARIZE)) for name, row in decoders.items())),
    ]
    for kind, heading in OTHERS.items():
        lines = (_named(name, row, (_LINEARIZE,)) for name, row in rows.items() if row["kind"] == kind)
        parts += [f"### {heading}", table((*head[:2], *head[3:]), lines)]
    return "\n\n".join(
        [*parts, "### Why a model is refused", table(("because", "`BoundedCache`", "`linearize_`"), _reasons(rows))]
    )


def _counted(decoders: dict[str, Row]) -> str:
    """How many decoders' caches are bounded, in all layers or some."""
    layers = [_layers(row, _BOUND) for row in decoders.values()]
    refused, none = layers.count("refused"), sum(words.startswith("0 of") for words in layers)
    every = layers.count("all")
    return (
        f"Of {len(layers)} configurations `BoundedCache` bounds all layers of {every}, some layers of "
        f"{len(layers) - every - none - refused}, leaves {none} whose layers all have a short sliding window, and "
        f"refuses {refused}."
    )


def _named(name: str, row: Row, ways: tuple[str, ...]) -> tuple[str, ...]:
    """One architecture."""
    return name, f"`{row['class']}`", *(_layers(row, way) for way in ways), _uses(row)


def _layers(row: Row, way: str) -> str:
    """How many layers are replaced, or bounded."""
    if row[way].startswith("refused"):
        return "refused"
    return row[way].partition(": ")[2].removesuffix(" layers") or "all"


def _uses(row: Row) -> str:
    """Whether all uses of a model work, which of them softmax does not have, and which are refused."""
    uses = [(use.removeprefix("bounded "), cell) for use, cell in row.items() if use not in _ABOUT]
    refused = dict.fromkeys(f"{use}: {cell}" for use, cell in uses if cell.startswith("refused"))
    absent = dict.fromkeys(use for use, cell in uses if cell == "-")
    if refused:
        return "; ".join(refused)
    if not uses:
        return "–"
    return "all work" + (f"; softmax has no {', '.join(absent)}" if absent else "")


def _reasons(rows: dict[str, Row]) -> list[tuple[str, ...]]:
    """Each reason, with the models that each function refuses for it."""
    reasons: dict[str, tuple[list[str], list[str]]] = {}
    for name, row in rows.items():
        for place, way in enumerate((_BOUND, _LINEARIZE)):
            if row.get(way, "").startswith("refused"):
                reasons.setdefault(_reason(row, way), ([], []))[place].append(name)
    return [(reason, *("; ".join(names) or "–" for names in refused)) for reason, refused in reasons.items()]


def _reason(row: Row, way: str) -> str:
    """Why no layer is replaced, or bounded, without the model's name, which stands beside it."""
    words = row[way].removeprefix("refused: ")
    reason = (words.partition(": ")[2] or words).removesuffix("; generate without a BoundedCache")
    return reason.replace("|", "&#124;")
