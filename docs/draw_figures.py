"""The pictures of README.md and of the site, as SVG for light and for dark pages.

`drawings` gives them by file name; docs/write_tables.py writes them. matplotlib draws, adjustText places labels.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from linattn_lab.kv_audit.names import BOUNDED, UNIFORM
from linattn_lab.report.memory.summary import MemoryLine, MemorySummary, is_few_bits
from memory_tables import MEMORY, audits_of
from picture_labels import CURVE, DARK, LIGHT, Point, level_baseline, mark, upright_baseline
from site_tables import BYTES, cache_bytes

# Words stay text; a page that has not this font draws them in one that is narrower.
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "linattn",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 72,
}
_WIDTH, _HEIGHT = 8.6, 5.5
_MEGA, _KIBI = 1e6, 1024
_MERGED, _QUANTIZED = "merged keys", "sinks + window in few bits"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Points by which labels move from one processor to another, whose sums are rounded otherwise.
_ROUNDING = 0.1


def drawings(audit: dict[str, Any]) -> dict[str, str]:
    """Every picture's file by its name; that of a KV cache is of the first audit of docs/memory.json."""
    files = {}
    for name, figure in pictures(audit, audits_of(MEMORY)[0]).items():
        files[f"{name}-light.svg"] = text = _svg(figure)
        for light, dark in zip(astuple(LIGHT), astuple(DARK), strict=True):
            text = text.replace(light, dark)
        files[f"{name}-dark.svg"] = text
    return files


def is_redrawn(before: str, after: str) -> bool:
    """Whether two files of a picture differ in more than the rounding of places."""
    if _NUMBER.split(before) != _NUMBER.split(after):
        return True
    places = zip(_NUMBER.findall(before), _NUMBER.findall(after), strict=True)
    return any(abs(float(x) - float(y)) > _ROUNDING for x, y in places)


def pictures(audit: dict[str, Any], memory: MemorySummary) -> dict[str, Figure]:
    """Every picture by its name, in light colours."""
    with mpl.rc_context(_STYLE):
        return {
            "kl_against_bytes": kl_against_bytes(memory),
            "error_against_bytes": error_against_bytes(audit),
            "state_is_a_monoid": state_is_a_monoid(),
        }


def kl_against_bytes(memory: MemorySummary) -> Figure:
    """Methods of an audit of a bounded KV cache by bytes and KL, at the longest text, named at the largest budget."""
    length = max(line.num_tokens for line in memory.lines)
    axes = _axes("KV cache, MB", "KL from the full cache, nats")
    axes.set(xscale="log", yscale="log")
    colours = {BOUNDED: LIGHT.merged, _MERGED: LIGHT.expansion, _QUANTIZED: LIGHT.exact}
    points = []
    for name, lines in _curves(memory, length).items():
        colour = colours.get(name.partition(",")[0], LIGHT.plain)
        width = 2.5 if name == BOUNDED else 1.2
        axes.plot(
            [_megabytes(x) for x in lines], [x.kl for x in lines], color=colour, linewidth=width, zorder=1, gid=CURVE
        )
        labels = [""] * (len(lines) - 1) + [name]
        for line, words in zip(lines, labels, strict=True):
            points.append(Point(_megabytes(line), line.kl, words, colour, is_filled=line.unmerged < 1))
    baselines = memory.without_budget(length)
    full = _megabytes(baselines[0])
    level_baseline(axes, UNIFORM, next(line.kl for line in baselines if line.method == UNIFORM))
    upright_baseline(axes, "full cache\n(KL 0)", full)
    axes.set_xlim(min(point.x for point in points) / 1.5, full * 2)
    _ticks(axes, [2.0**power for power in range(-4, 12)], lambda size: f"{size:g}")
    mark(axes, points)
    return axes.get_figure()


def error_against_bytes(audit: dict[str, Any]) -> Figure:
    """Each method of an audit of an encoder by the bytes it keeps and its error, beside both baselines."""
    axes = _axes("bytes kept per head, float32", "relative output error")
    axes.set(xscale="log", xlim=(2.4e3, 6e5), ylim=(0, 0.85))
    points = [_encoder_point(line) for line in audit["lines"]]
    curve = sorted((point.x, point.y) for point in points if point.colour == LIGHT.expansion)
    axes.plot([x for x, _ in curve], [y for _, y in curve], color=LIGHT.expansion, linewidth=1.2, zorder=1, gid=CURVE)
    level_baseline(axes, UNIFORM, audit["baselines"][1]["error"])
    upright_baseline(axes, f"exact keys and values\nof {audit['tokens']} tokens (error 0)", cache_bytes(audit))
    _ticks(axes, [size * _KIBI for size in (4, 16, 64, 256)], lambda size: f"{size / _KIBI:g} KiB")
    mark(axes, points)
    return axes.get_figure()


def kl_words() -> str:
    """What stands under the picture of KL against bytes."""
    audit = audits_of(MEMORY)[0]
    header, length = audit.header, max(line.num_tokens for line in audit.lines)
    return (
        f"*KL divergence from the full cache against bytes of the KV cache: {header.model} in {header.dtype}, "
        f"{length:,} tokens of each of {', '.join(header.texts)}, mean over passages. Sinks + window in few bits: the "
        "bits with the least KL at each budget. Lower and farther left is better. Hollow marks: every token is kept "
        "one by one, none merged or evicted.*"
    )


def _curves(memory: MemorySummary, length: int) -> dict[str, list[MemoryLine]]:
    """Lines of each method by its name, fewest bytes first; windows in few bits by the least KL of each budget."""
    curves: dict[str, list[MemoryLine]] = {}
    for num_tokens, budget in memory.settings:
        lines: dict[str, MemoryLine] = {}
        for line in memory.at(num_tokens, budget) if num_tokens == length else ():
            lines.setdefault(_QUANTIZED if is_few_bits(line) else line.method, line)
        for name, line in lines.items():
            curves.setdefault(name, []).append(line)
    return {name: sorted(lines, key=lambda line: line.num_bytes) for name, lines in curves.items()}


def _megabytes(line: MemoryLine) -> float:
    """What a method keeps in all bounded layers."""
    return line.num_bytes / _MEGA


def _encoder_point(line: dict[str, Any]) -> Point:
    """A method of an encoder's audit."""
    name, place = short(line), (BYTES * line["state_numbers"], line["error"])
    if "merged" in name:
        return Point(*place, name, LIGHT.merged, "s")
    if "+" in name:
        return Point(*place, name, LIGHT.exact, "s")
    return Point(*place, name, LIGHT.expansion if "centre" in name else LIGHT.plain)


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


def state_is_a_monoid() -> Figure:
    """Three pieces of a text, their states, and two ways to merge them to one."""
    axes = _figure(4.8).add_axes((0, 0, 1, 1), xlim=(0, 620), ylim=(346, 0))
    axes.set_axis_off()
    boxes = {
        "a": (90, 25, "a: 3 tokens"),
        "b": (310, 25, "b: 5 tokens"),
        "c": (530, 25, "c: 2 tokens"),
        "A": (90, 95, "state of a: S, z, m"),
        "B": (310, 95, "state of b: S, z, m"),
        "C": (530, 95, "state of c: S, z, m"),
        "AB": (200, 170, "merge(a, b)"),
        "BC": (420, 170, "merge(b, c)"),
        "ABC": (310, 245, "merge(merge(a, b), c) = merge(a, merge(b, c))"),
        "out": (310, 320, "out = φ(q)ᵀS / φ(q)ᵀz"),
    }
    frame = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": LIGHT.expansion}
    texts = {
        name: axes.text(x, y, words, color=LIGHT.words, ha="center", va="center", bbox=frame)
        for name, (x, y, words) in boxes.items()
    }
    for arrow in ("a A", "b B", "c C", "A AB", "B AB", "B BC", "C BC", "AB ABC", "BC ABC", "ABC out"):
        start, stop = arrow.split()
        ends = {"patchA": texts[start].get_bbox_patch(), "patchB": texts[stop].get_bbox_patch()}
        style = {"arrowstyle": "-|>", "color": LIGHT.faint, "shrinkA": 2, "shrinkB": 2, **ends}
        axes.annotate("", xy=boxes[stop][:2], xytext=boxes[start][:2], arrowprops=style)
    for x, y, words in (
        (98, 60, "absorb"),
        (318, 60, "absorb"),
        (538, 60, "absorb"),
        (318, 285, "read with any queries"),
    ):
        axes.text(x, y, words, color=LIGHT.words, va="center")
    return axes.get_figure()


def _figure(height: float) -> Figure:
    """An empty drawing."""
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    return figure


def _axes(x: str, y: str) -> Axes:
    """An empty drawing with two axes."""
    axes = _figure(_HEIGHT).add_axes((0.09, 0.1, 0.9, 0.88))
    axes.set_xlabel(x, color=LIGHT.words)
    axes.set_ylabel(y, color=LIGHT.words)
    axes.tick_params(which="both", color=LIGHT.faint, labelcolor=LIGHT.words)
    axes.spines[:].set_color(LIGHT.faint)
    return axes


def _ticks(axes: Axes, sizes: Sequence[float], words: Callable[[float], str]) -> None:
    """Ticks of the level axis."""
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(FixedLocator([size for size in sizes if low <= size <= high]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: words(size)))
    axes.xaxis.set_minor_locator(NullLocator())


def _svg(figure: Figure) -> str:
    """A file, the same whenever it is written."""
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
