"""What an audit says, in words: which map to take at which budget, and where none is worth it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from linattn.lab.report._tables import number
from linattn.lab.report.summary import SMALL_GAIN, Line, Summary


@dataclass(frozen=True)
class Point:
    """A remark with its heading.

    Attributes:
        heading: what it is about, no full stop.
        text: one or a few sentences.
    """

    heading: str
    text: str


@dataclass(frozen=True)
class Advice:
    """The words of a report.

    Attributes:
        budgets: what to take, one point per budget of features.
        doubts: which maps are no better than averaging the values, and which hardly better; one point each, if any.
    """

    budgets: tuple[Point, ...]
    doubts: tuple[Point, ...]


def advise(summary: Summary) -> Advice:
    """Put an audit into words.

    Best means the least relative output error, mean over heads and draws. A map's errors count against it by their
    spread over draws: it is better than averaging only if mean plus spread is below averaging's error.

    Cost: linear in the heads.

    Args:
        summary: of an audit.

    Returns:
        An `Advice`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from linattn.lab.records import Header, HeadRow, ModelRow, write_records
        >>> from linattn.lab.report import summarise
        >>> path = Path(tempfile.mkdtemp()) / "audit.jsonl"
        >>> header = Header({}, "m", "M", False, 1, 1, 2, "t", "", 8, 0, 8, ["Relu"], [64], 1, 0)
        >>> head = HeadRow(0, 0, "Relu", 2, 0, None, 0.2, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None)
        >>> models = [ModelRow("exact", None, 0, 1.0, 1.0), ModelRow("uniform", None, 0, 0.5, 0.5)]
        >>> write_records(path, header, [*models, head, ModelRow("Relu", 2, 0, 0.9, 0.9)])
        >>> advise(summarise(path)).budgets[0].text.split(",")[0]
        'Take Relu (2 features): relative output error 0.20'

    Source: none, comparisons.
    """
    asked = set(summary.header.features)
    wider = {line.features for line in summary.lines if line.features > max(asked)}
    return Advice(
        tuple(_at_budget(summary, budget) for budget in sorted(asked | wider)),
        tuple(point for verdict in ("no better", "hardly better") if (point := _doubt(summary, verdict))),
    )


def best_at(summary: Summary, budget: int) -> Line | None:
    """The line with the least error among those of at most so many features, or None where there is none."""
    return min(_affordable(summary, budget), key=lambda line: line.error.mean, default=None)


def _affordable(summary: Summary, budget: int) -> list[Line]:
    """The lines within a budget."""
    return [line for line in summary.lines if line.features <= budget]


def _at_budget(summary: Summary, budget: int) -> Point:
    """What to take at a budget: one map for all heads, for the whole model, and head by head."""
    heading = f"Up to {budget:,} features per head"
    best = best_at(summary, budget)
    if best is None:
        return Point(heading, "None of the maps is that narrow.")
    found = f"{best.map} ({best.features:,} features): relative output error {number(best.error.mean)}"
    against = f"averaging the values {number(best.uniform_error)}"
    if best.verdict == "no better":
        first = f"No single map is better than averaging. The least error has {found}; {against}. Keep exact attention."
    else:
        verb = "Take" if best.verdict == "better" else "Nothing is much better than averaging. The least error has"
        cosine, other = best.embedding_cosine.mean, summary.baselines[1].embedding_cosine
        first = f"{verb} {found}, {against}; cosine of the embedding {number(cosine, 3)}, averaging {number(other, 3)}."
    parts = (first, _for_whole_model(summary, budget, best), _head_by_head(summary, budget))
    return Point(heading, " ".join(filter(None, parts)))


def _for_whole_model(summary: Summary, budget: int, best: Line) -> str | None:
    """The map with the highest cosine, where that is another one."""
    finite = [line for line in _affordable(summary, budget) if math.isfinite(line.embedding_cosine.mean)]
    whole = max(finite, key=lambda line: line.embedding_cosine.mean, default=best)
    if whole is best:
        return None
    return (
        f"The whole model keeps a higher cosine, {number(whole.embedding_cosine.mean, 3)}, with {whole.map} "
        f"({whole.features:,} features; error {number(whole.error.mean)})."
    )


def _head_by_head(summary: Summary, budget: int) -> str | None:
    """What a choice per head would reach, averaging among the choices; judged on the heads it is made on."""
    lines = _affordable(summary, budget)
    if len({line.map for line in lines}) < 2:
        return None
    chosen: Counter[str] = Counter()
    errors = []
    for layer, uniform in enumerate(summary.uniform_errors):
        for head, averaging in enumerate(uniform):
            ratios = {line.map: math.inf for line in lines} | {"averaging": 1.0}
            for line in lines:
                ratio = summary.head_ratios[line.map, line.features][layer][head]
                ratios[line.map] = min(ratios[line.map], ratio)
            name = min(ratios, key=lambda label: ratios[label])
            chosen[name] += 1
            errors.append(averaging * ratios[name])
    heads = ", ".join(f"{name} on {count}" for name, count in chosen.most_common(3))
    more = "" if len(chosen) <= 3 else ", others on the rest"
    error = number(sum(errors) / len(errors))
    return f"Chosen head by head, on this text: error {error} ({heads}{more} of {len(errors)} heads)."


def _doubt(summary: Summary, verdict: str) -> Point | None:
    """Every map and width of one verdict, with the share of heads it serves all the same; None if there is none."""
    found: dict[str, list[str]] = {}
    for line in summary.lines:
        if line.verdict == verdict:
            found.setdefault(line.map, []).append(f"{line.features:,} ({line.better_heads:.0%})")
    if not found:
        return None
    less = f", by less than {SMALL_GAIN:.0%}" if verdict == "hardly better" else ""
    names = "; ".join(f"{label} at {', '.join(widths)}" for label, widths in found.items())
    return Point(
        f"{verdict.capitalize()} than averaging the values{less}",
        f"{names} features; in brackets the share of heads on which it is better all the same.",
    )
