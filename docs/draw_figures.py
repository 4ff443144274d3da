"""The drawings of README.md and of the site, as SVG for light and for dark pages.

`drawings` gives them by file name; docs/write_tables.py writes them. Lengths are in the drawing's own units, pixels
where it is shown at its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from site_tables import BYTES, cache_bytes


@dataclass(frozen=True)
class Palette:
    """Colours, each of which has a contrast of at least 4.5 with the page where it colours words."""

    words: str
    faint: str
    plain: str
    expansion: str
    exact: str
    merged: str


PALETTES = {
    "light": Palette("#1f2328", "#8b949e", "#9a4a00", "#0b57c2", "#1a7037", "#a11b78"),
    "dark": Palette("#e6e8eb", "#7d8590", "#f2a65a", "#7db4ff", "#6fd08c", "#f08cc8"),
}
_WIDTH, _HEIGHT = 620, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 606, 16, 352
_FEWEST, _MOST, _WORST = 2e3, 8e5, 0.85
# Where a label stands beside its point: anchor, then right and down of it; right of it where none is named.
_BESIDE = {
    "FavorPlus, 256": ("start", 10, -4),
    "16 centres + w32": ("end", -10, -6),
    "64 centres + w32 + h64": ("end", 60, -11),
    "Centred(Balanced(Sderf)), 256": ("end", -9, 4),
    "4 centres": ("start", 9, -4),
    "16 centres": ("start", 9, -4),
    "1 centre": ("end", -9, 4),
    "64 centres": ("start", 9, -6),
    "merged 64": ("end", -9, 4),
    "merged 128": ("end", -9, 4),
    "merged 32 + w32": ("end", -10, 5),
    "merged 96 + w32": ("end", -10, 5),
    "merged 128 + w32": ("end", -10, 14),
}


def drawings(audit: dict[str, Any]) -> dict[str, str]:
    """Every drawing by its file name."""
    kinds: dict[str, Callable[[Palette], str]] = {
        "error_against_bytes": lambda palette: error_against_bytes(audit, palette),
        "state_is_a_monoid": state_is_a_monoid,
    }
    return {f"{kind}-{name}.svg": draw(palette) for kind, draw in kinds.items() for name, palette in PALETTES.items()}


def error_against_bytes(audit: dict[str, Any], palette: Palette) -> str:
    """Every method of an audit by the bytes it keeps and its error, beside both baselines."""
    averaging, cache = audit["baselines"][1]["error"], cache_bytes(audit)
    parts = [*_axes(palette), *_baselines(averaging, cache, audit["tokens"], palette)]
    curve = sorted(
        (x for x in audit["lines"] if x["method"].startswith("Expansion") and "+" not in x["method"]), key=_bytes
    )
    if curve:
        path = " ".join(f"{_x(_bytes(x)):.1f},{_y(x['error']):.1f}" for x in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{palette.expansion}" stroke-width="1.5"/>')
    parts += [_point(line, palette) for line in audit["lines"]]
    title = f"Error against bytes per head, {audit['model']}, {audit['tokens']} tokens"
    return _svg(_WIDTH, _HEIGHT, title, parts)


def _bytes(line: dict[str, Any]) -> int:
    """What a method keeps per head."""
    numbers: int = line["state_numbers"]
    return BYTES * numbers


def _x(num_bytes: float) -> float:
    """Where so many bytes stand, on a logarithmic axis."""
    share = math.log(num_bytes / _FEWEST) / math.log(_MOST / _FEWEST)
    return _LEFT + share * (_RIGHT - _LEFT)


def _y(error: float) -> float:
    """Where an error stands."""
    return _BOTTOM - error / _WORST * (_BOTTOM - _TOP)


def short(line: dict[str, Any]) -> str:
    """A method in few words: w for window.

    Example:
        >>> short({"method": "Expansion(num_centres=16) + window 32", "features": None})
        '16 centres + w32'
        >>> short({"method": "Centred(Balanced(FavorPlus)) + window 16", "features": 256})
        'FavorPlus, 256 + w16'
        >>> short({"method": "window 32 + merged 96", "features": None})
        'merged 96 + w32'
    """
    name, *exact = line["method"].split(" + ")
    if exact and exact[-1].startswith("merged"):
        name, exact = exact[-1], [name]
    found = re.fullmatch(r"Expansion\(num_centres=(\d+)\)", name)
    if found:
        name = "1 centre" if found[1] == "1" else f"{found[1]} centres"
    name = re.sub(r"Centred\(Balanced\((\w+)\)\)", r"\1", name) if exact else name
    name = name.replace("(lengths='fixed')", "").replace("(order=2)", " 2")
    width = f", {line['features']}" if line["features"] else ""
    return " + ".join([name + width, *(part.replace("window ", "w") for part in exact)])


def _point(line: dict[str, Any], palette: Palette) -> str:
    """A method's point and label."""
    label, (x, y) = short(line), (_x(_bytes(line)), _y(line["error"]))
    if "+" in line["method"] or "merged" in line["method"]:
        colour = palette.merged if "merged" in line["method"] else palette.exact
        mark = f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"'
    else:
        is_expansion = line["method"].startswith("Expansion")
        colour, mark = (
            palette.expansion if is_expansion else palette.plain,
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"',
        )
    anchor, right, down = _BESIDE.get(label, ("start", 9, 4))
    return f'{mark} fill="{colour}"/>{_words(x + right, y + down, label, colour, anchor)}'


def _axes(palette: Palette) -> list[str]:
    """Both axes with their ticks."""
    parts = [
        f'<path d="M{_LEFT},{_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="{palette.faint}"/>',
        _words((_LEFT + _RIGHT) / 2, _HEIGHT - 8, "bytes kept per head, float32", palette.words, "middle"),
        f'<g transform="rotate(-90 14 {(_TOP + _BOTTOM) / 2:.0f})">'
        f"{_words(14, (_TOP + _BOTTOM) / 2, 'relative output error', palette.words, 'middle')}</g>",
    ]
    for thousands in (4, 16, 64, 256):
        x = _x(thousands * 1024)
        parts.append(f'<path d="M{x:.1f},{_BOTTOM}v5" stroke="{palette.faint}"/>')
        parts.append(_words(x, _BOTTOM + 20, f"{thousands} KiB", palette.words, "middle"))
    for tenths in (0, 2, 4, 6, 8):
        y = _y(tenths / 10)
        parts.append(f'<path d="M{_LEFT},{y:.1f}h-5" stroke="{palette.faint}"/>')
        parts.append(_words(_LEFT - 8, y + 4.5, f"{tenths / 10:g}", palette.words, "end"))
    return parts


def _baselines(averaging: float, cache: int, tokens: int, palette: Palette) -> list[str]:
    """Averaging the values, and what exact attention keeps."""
    y, x = _y(averaging), _x(cache)
    return [
        f'<path d="M{_LEFT},{y:.1f}H{_RIGHT}" stroke="{palette.faint}" stroke-dasharray="5 4"/>',
        _words(_RIGHT, y - 7, "averaging the values", palette.words, "end"),
        f'<path d="M{x:.1f},{_TOP + 30}V{_BOTTOM}" stroke="{palette.faint}" stroke-dasharray="5 4"/>',
        _words(x + 6, _y(0.64), "exact keys and values", palette.words, "start"),
        _words(x + 6, _y(0.64) + 16, f"of {tokens} tokens (error 0)", palette.words, "start"),
    ]


def state_is_a_monoid(palette: Palette) -> str:
    """Three pieces of a text, their states, and two ways to merge them to one."""
    parts = [
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 8,4 0,8z" fill="{palette.faint}"/></marker></defs>'
    ]
    pieces = (("a", 3, 90), ("b", 5, 310), ("c", 2, 530))
    for name, count, middle in pieces:
        left = middle - count * 13
        parts += [
            f'<rect x="{left + 26 * i + 2}" y="14" width="22" height="22" rx="3" fill="none" stroke="{palette.plain}"/>'
            for i in range(count)
        ]
        parts.append(_words(left - 8, 30, name, palette.plain, "end"))
        parts += [_arrow(middle, 40, middle, 72, palette), _words(middle + 10, 61, "absorb", palette.words, "start")]
        parts.append(_box(middle, 90, f"state of {name}: S, z, m", palette, 168))
    parts += [
        _arrow(90, 110, 180, 150, palette),
        _arrow(290, 110, 220, 150, palette),
        _box(200, 168, "merge(a, b)", palette, 130),
        _arrow(330, 110, 400, 150, palette),
        _arrow(530, 110, 440, 150, palette),
        _box(420, 168, "merge(b, c)", palette, 130),
        _arrow(220, 188, 285, 228, palette),
        _arrow(400, 188, 335, 228, palette),
        _box(310, 246, "merge(merge(a, b), c) = merge(a, merge(b, c))", palette, 370),
        _arrow(310, 266, 310, 298, palette),
        _words(322, 288, "read with any number of queries", palette.words, "start"),
        _box(310, 316, "out = φ(q)ᵀS / φ(q)ᵀz", palette, 220),
    ]
    return _svg(
        _WIDTH, 346, "States of pieces of a text merge to the state of the whole, in any order of brackets", parts
    )


def _arrow(x: float, y: float, to_x: float, to_y: float, palette: Palette) -> str:
    """A line with a tip."""
    return f'<path d="M{x},{y}L{to_x},{to_y}" stroke="{palette.faint}" stroke-width="1.3" marker-end="url(#tip)"/>'


def _box(x: float, y: float, words: str, palette: Palette, width: float) -> str:
    """Words in a box around (x, y)."""
    return (
        f'<rect x="{x - width / 2}" y="{y - 18}" width="{width}" height="36" rx="5" fill="none" '
        f'stroke="{palette.expansion}"/>' + _words(x, y + 5, words, palette.words, "middle")
    )


def _words(x: float, y: float, words: str, colour: str, anchor: str) -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def _svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """A file."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13.5">\n<title>{title}</title>\n{body}\n</svg>\n'
    )
