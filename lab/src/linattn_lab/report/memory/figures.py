"""Charts of an audit of a constant memory: KL against bytes, and along a passage."""

from __future__ import annotations

from collections.abc import Sequence

from linattn_lab.constant_memory.records import EXACT, UNIFORM
from linattn_lab.report.charts import NUM_COLOURS, Axis, Chart, Curve, baseline, drawable
from linattn_lab.report.memory.summary import MemorySummary


def kl_by_bytes(summary: MemorySummary) -> Chart:
    """KL divergence against the bytes kept, one curve per contender; the dotted line is averaging the values."""
    curves = []
    for place, name in enumerate(_names(summary)):
        lines = [line for line in summary.lines if line.contender == name and line.passages]
        lines.sort(key=lambda line: line.num_bytes)
        points = [(line.num_bytes, line.kl) for line in lines]
        curves.append(_curve(place, name, points, [f"{x:,} bytes" for x, _ in points]))
    uniform = summary.line(UNIFORM)
    ends = [line.num_bytes for line in summary.lines if line.budget and line.passages]
    if uniform is not None and uniform.passages and ends:
        curves.append(baseline("averaging the values", [min(ends), max(ends)], [uniform.kl] * 2, "dot"))
    return _chart(curves, "bytes kept in all global layers")


def kl_by_position(summary: MemorySummary, budget: int) -> Chart:
    """KL divergence along a passage at one budget, one curve per contender."""
    curves = []
    for place, name in enumerate(_names(summary)):
        line = summary.line(name, budget)
        if line is not None and line.passages:
            points = list(zip(summary.header.ends, line.kl_by_position, strict=True))
            curves.append(_curve(place, name, points, [f"up to {end:,}" for end, _ in points]))
    return _chart(curves, "position in the passage, tokens")


def _names(summary: MemorySummary) -> list[str]:
    """Contenders in order, baselines left out."""
    found = (line.contender for line in summary.lines if line.contender not in (EXACT, UNIFORM))
    return list(dict.fromkeys(found))


def _curve(place: int, name: str, points: Sequence[tuple[int, float]], where: Sequence[str]) -> Curve:
    """One contender; where nothing is lost the point lies below any logarithmic axis."""
    return Curve(
        name,
        tuple(x for x, _ in points),
        tuple(drawable(y, is_logarithmic=True) for _, y in points),
        tuple(f"{name}, {words}: {y:.4f}" for (_, y), words in zip(points, where, strict=True)),
        place % NUM_COLOURS,
        "solid" if place < NUM_COLOURS else "dot",
    )


def _chart(curves: Sequence[Curve], title: str) -> Chart:
    """Logarithmic axes."""
    kl = Axis("KL from the exact model, nats", is_logarithmic=True)
    return Chart(tuple(curves), Axis(title, is_logarithmic=True), kl, height=440)
