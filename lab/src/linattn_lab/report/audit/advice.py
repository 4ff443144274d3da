"""What an audit says, in words: which method to take for which error or budget, and where none is worth it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from linattn_lab.report._text import Point, counted, number
from linattn_lab.report.audit.frontier import RANDOM, family
from linattn_lab.report.audit.paying import TARGETS, best_line
from linattn_lab.report.audit.summary import SMALL_GAIN, AuditSummary, Line

_NAMED_HEADS = 5


@dataclass(frozen=True)
class Advice:
    """The words of a report."""

    targets: tuple[Point, ...]  # which method meets a mean error at the smallest state, one point per error
    budgets: tuple[Point, ...]  # what to take, one point per budget of numbers kept
    # how random features alone stand, which heads stay bad, which maps are no better than uniform attention and
    # which hardly better; one point each, if any
    doubts: tuple[Point, ...]


def advise(summary: AuditSummary) -> Advice:
    """Put an audit into words.

    Best means the least relative output error, mean over heads and draws. A map's errors count against it by their
    spread over draws: it is better than uniform attention only if mean plus spread is below that one's error.
    """
    budgets = [(width, width * (summary.header.value_dim + 2)) for width in sorted(summary.header.features)]
    doubts = (_random_features(summary), _bad_heads(summary))
    verdicts = (_doubt(summary, verdict) for verdict in ("no better", "hardly better"))
    return Advice(
        tuple(_at_target(summary, target) for target in TARGETS),
        tuple(_at_budget(summary, width, numbers) for width, numbers in budgets),
        tuple(point for point in (*doubts, *verdicts) if point),
    )


def _at_target(summary: AuditSummary, target: float) -> Point:
    """The method that meets a mean error with the fewest numbers, and the fastest one."""
    heading = f"For a mean error of {target}"
    met = [line for line in summary.lines if line.error.mean <= target]
    if not met:
        best = best_line(summary.lines)
        nearest = f"; least error: {_found(best)}" if best else ""
        return Point(heading, f"No method measured reaches it{nearest}.")
    small = min(met, key=lambda line: (line.state_numbers, line.flops_per_token))
    fast = min(met, key=lambda line: (line.time_ratio or math.inf, line.flops_per_token, line.state_numbers))
    if fast is small:
        return Point(heading, f"Smallest state and least time: {_found(small)}.")
    return Point(heading, f"Smallest state: {_found(small)}. Least time: {_found(fast)}.")


def _found(line: Line) -> str:
    """A method with its error and its costs."""
    time = "" if line.time_ratio is None else f", {number(line.time_ratio)} × softmax's time"
    return f"{line.words}, error {number(line.error.mean)}, {line.state_numbers:,} numbers kept per head{time}"


def _random_features(summary: AuditSummary) -> Point | None:
    """How random features alone stand to uniform attention, where some of them are no better."""
    alone = [line for line in summary.lines if family(line.map) == RANDOM]
    lost = [line for line in alone if line.verdict == "no better"]
    best = best_line(alone)
    if best is None or not lost:
        return None
    verb = "is" if len(lost) == 1 else "are"
    share = f"The one measured {verb}" if len(alone) == 1 else f"{len(lost)} of {len(alone)} measured {verb}"
    name = best.words if len(alone) == 1 else f"the best, {best.words},"
    return Point(
        "Random features alone",
        f"{share} no better than uniform attention: {name} has {number(best.ratio)} × its error.",
    )


def _bad_heads(summary: AuditSummary) -> Point | None:
    """The heads on which even the best method's error stays high."""
    best = best_line(summary.lines)
    if best is None:
        return None
    errors = {
        (layer, head): ratio * summary.uniform_errors[layer][head]
        for layer, found in enumerate(best.head_ratios)
        for head, ratio in enumerate(found)
    }
    bad = sorted((key for key in errors if errors[key] > TARGETS[0]), key=lambda key: -errors[key])
    if not bad:
        return None
    named = "; ".join(
        f"layer {summary.header.number(layer)} head {head} ({number(errors[layer, head])})"
        for layer, head in bad[:_NAMED_HEADS]
    )
    more = "" if len(bad) <= _NAMED_HEADS else f"; and {len(bad) - _NAMED_HEADS} more"
    return Point(
        f"Heads that stay above {TARGETS[0]}",
        f"With {best.words}, the best method measured, {len(bad)} of {counted(len(errors), 'head')}: {named}{more}. "
        "Keep softmax in these layers: name the others in linearize_(…, layers=[…]).",
    )


def _at_budget(summary: AuditSummary, width: int, numbers: int) -> Point:
    """What to take at a budget: for the heads, and for the whole model."""
    heading = f"Up to {numbers:,} numbers per head, what {width:,} random features keep"
    affordable = [line for line in summary.lines if line.state_numbers <= numbers]
    best = best_line(affordable)
    if best is None:
        return Point(heading, "No method measured keeps so few.")
    found = f"{best.words}: relative output error {number(best.error.mean)}"
    against = f"uniform attention {number(best.uniform_error)}"
    if best.verdict == "no better":
        first = f"No method is better than uniform attention; the best is {found}; {against}. Keep exact attention."
    else:
        verb = "Take" if best.verdict == "better" else "Nothing is much better than uniform attention; the best is"
        cosine, other = best.embedding_cosine.mean, summary.baselines[1].embedding_cosine
        first = f"{verb} {found}, {against}; cosine of the embedding {number(cosine, 3)}, uniform {number(other, 3)}."
    parts = (first, _for_whole_model(affordable, best))
    return Point(heading, " ".join(filter(None, parts)))


def _for_whole_model(lines: list[Line], best: Line) -> str | None:
    """The method with the highest cosine, where that is another one."""
    finite = [line for line in lines if math.isfinite(line.embedding_cosine.mean)]
    whole = max(finite, key=lambda line: line.embedding_cosine.mean, default=best)
    if whole is best:
        return None
    return (
        f"The whole model keeps a higher cosine, {number(whole.embedding_cosine.mean, 3)}, with {whole.words}: error "
        f"{number(whole.error.mean)}."
    )


def _doubt(summary: AuditSummary, verdict: str) -> Point | None:
    """Every map and width of one verdict, with the share of heads it serves all the same; None if there is none."""
    found = [f"{line.words}: {line.better_heads:.0%}" for line in summary.lines if line.verdict == verdict]
    if not found:
        return None
    less = f", by less than {SMALL_GAIN:.0%}" if verdict == "hardly better" else ""
    return Point(
        f"{verdict.capitalize()} than uniform attention{less}",
        f"The share of heads on which a method is better all the same: {'; '.join(found)}.",
    )
