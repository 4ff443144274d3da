"""An audit's frontier: error against what a method keeps and computes, one curve for each family of methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from linattn.feature_maps import FEATURE_MAPS, LearnedMap, RandomFeatureMap
from linattn.methods.method import parse_method
from linattn_lab.costs import exact_flops_per_token
from linattn_lab.report.audit.summary import AuditSummary, Line
from linattn_lab.report.charts import NUM_COLOURS, Axis, Chart, Curve, baseline, drawable

RANDOM = "random features"
MERGED = "merged keys"
_DEFAULT_ORDER = 1


def family(label: str) -> str:
    """The family of a method, given its written form: what its map is built on, and whether it has a window."""
    method = parse_method(label)
    if method.map is None:
        return MERGED
    name = method.map.name
    if name == "Expansion":
        kind = f"Expansion, order {dict(method.map.options).get('order', _DEFAULT_ORDER)}"
    elif issubclass(FEATURE_MAPS[name], RandomFeatureMap):
        kind = RANDOM
    elif issubclass(FEATURE_MAPS[name], LearnedMap):
        kind = "learned maps, untrained"
    else:
        kind = "elementwise and polynomial maps"
    return kind if method.window is None else f"{kind}, with a window"


def state_frontier(summary: AuditSummary) -> Chart:
    """Error against the numbers kept per head, with the limit of the rank."""
    curves = _curves(summary, lambda line: line.state_numbers, "numbers")
    if summary.limits:
        curves.append(
            Curve(
                "matrix cut to a rank (SVD)",
                tuple(limit.state_numbers for limit in summary.limits),
                tuple(drawable(limit.error, is_logarithmic=True) for limit in summary.limits),
                tuple(
                    f"rank {limit.rank:,}, {limit.state_numbers:,} numbers: {limit.error:.3f}"
                    for limit in summary.limits
                ),
                None,
                "dash",
                "none",
            )
        )
    return _chart(curves, summary, summary.exact_numbers, "numbers kept per head")


def flops_frontier(summary: AuditSummary) -> Chart:
    """Error against the operations per head and token."""
    header = summary.header
    curves = _curves(summary, lambda line: line.flops_per_token, "FLOPs")
    exact = exact_flops_per_token(
        header.num_tokens, head_dim=header.head_dim, value_dim=header.value_dim, is_causal=header.is_causal
    )
    return _chart(curves, summary, exact, "FLOPs per head and token")


def least(lines: Iterable[Line], size: Callable[[Line], float]) -> list[Line]:
    """Those no other of the lines beats: ascending in size, descending in error."""
    found: list[Line] = []
    for line in sorted(lines, key=lambda one: (size(one), one.error.mean)):
        if math.isfinite(line.error.mean) and (not found or line.error.mean < found[-1].error.mean):
            found.append(line)
    return found


def _curves(summary: AuditSummary, size: Callable[[Line], int], unit: str) -> list[Curve]:
    """One curve through the best of each family."""
    families: dict[str, list[Line]] = {}
    for line in summary.lines:
        families.setdefault(family(line.map), []).append(line)
    curves = []
    for place, (name, lines) in enumerate(families.items()):
        best = least(lines, size)
        tips = (f"{line.words}, {size(line):,} {unit}: {line.error.mean:.3f}" for line in best)
        curves.append(
            Curve(
                name,
                tuple(size(line) for line in best),
                tuple(drawable(line.error.mean, is_logarithmic=True) for line in best),
                tuple(tips),
                place % NUM_COLOURS,
                "dot" if name.endswith("with a window") else "solid",
            )
        )
    return curves


def _chart(curves: Sequence[Curve], summary: AuditSummary, exact: int, title: str) -> Chart:
    """Both baselines and logarithmic axes."""
    sizes = [x for curve in curves for x in curve.x]
    errors = [y for curve in curves for y in curve.y if y is not None]
    uniform = summary.baselines[1].error
    tokens = f"exact attention over {summary.header.num_tokens:,} tokens"
    return Chart(
        (
            *curves,
            baseline("uniform attention", [min(sizes), max(*sizes, exact)], [uniform] * 2, "dot"),
            baseline(tokens, [exact] * 2, [min(errors, default=uniform), uniform], "dashdot"),
        ),
        Axis(title, is_logarithmic=True),
        Axis("relative output error", is_logarithmic=True),
        height=440,
    )
