"""A chart of an audit of a bounded KV cache: KL against bytes."""

from __future__ import annotations

from collections.abc import Sequence

from linattn_lab.kv_audit.names import UNIFORM
from linattn_lab.report.charts import NUM_COLOURS, Axis, Chart, Curve, baseline, drawable
from linattn_lab.report.memory.summary import MemoryLine, MemorySummary

_MEGA = 1e6


def kl_by_bytes(summary: MemorySummary, num_tokens: int) -> Chart:
    """KL against the bytes kept, one curve per method; the dotted line is uniform attention, up to the full cache."""
    lines = [line for line in summary.lines if line.num_tokens == num_tokens and line.budget]
    names = dict.fromkeys(line.method for line in lines)
    curves = [_curve(place, name, [x for x in lines if x.method == name]) for place, name in enumerate(names)]
    uniform = next((line for line in summary.without_budget(num_tokens) if line.method == UNIFORM), None)
    ends = [line.num_bytes / _MEGA for line in lines]
    if uniform is not None and ends:
        curves.append(baseline(UNIFORM, [min(ends), uniform.num_bytes / _MEGA], [uniform.kl] * 2, "dot"))
    kl = Axis("KL from the full cache, nats", is_logarithmic=True)
    return Chart(
        tuple(curves),
        Axis("MB kept in all bounded layers, up to the full cache's", is_logarithmic=True),
        kl,
        height=360,
    )


def _curve(place: int, name: str, lines: Sequence[MemoryLine]) -> Curve:
    """One method; where nothing is lost the point lies below any logarithmic axis."""
    return Curve(
        name,
        tuple(line.num_bytes / _MEGA for line in lines),
        tuple(drawable(line.kl, is_logarithmic=True) for line in lines),
        tuple(f"{name}, {line.num_bytes:,} bytes: {line.kl:.4f}" for line in lines),
        place % NUM_COLOURS,
        "solid" if place < NUM_COLOURS else "dot",
    )
