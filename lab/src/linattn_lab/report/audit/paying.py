"""Whether a method pays: its time beside softmax's, its state beside the exact cache, and from which length on."""

from __future__ import annotations

import math

from linattn.methods.costs import exact_state_numbers
from linattn.methods.crossover import from_where
from linattn_lab.report._text import Point, number
from linattn_lab.report.audit.summary import AuditSummary, Line

# Mean errors that are asked for: fair, and good.
TARGETS = (0.3, 0.1)


def verdict(summary: AuditSummary) -> Point:
    """Should this model be linearized, for this length: in words, for one named method.

    A smaller state is of use where it is kept between calls: an encoder keeps none.

    The method is the fastest of those with a mean error of at most 0.1, if one of them is faster than softmax; else of
    those with at most 0.3; else the one with the least error.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from linattn_lab.audit.records import AUDIT, HeadRow, Header, ModelRow, TimeRow
        >>> from linattn_lab.report import summarise_audit
        >>> path = Path(tempfile.mkdtemp()) / "audit.jsonl"
        >>> header = Header({}, "m", "M", False, 1, 1, 2, 2, "t", "", 8, 0, 8, ["Relu"], [64], 1, 0)
        >>> head = HeadRow(0, 0, "Relu", 2, 0, None, 0.2, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None, 6, 20)
        >>> models = [ModelRow("exact", None, 0, 1.0, 1.0), ModelRow("uniform", None, 0, 0.5, 0.5)]
        >>> time = TimeRow("Relu", 2, (2.0,), (1.0,), 1)
        >>> AUDIT.write(path, header, [*models, head, time, ModelRow("Relu", 2, 0, 0.9, 0.9)])
        >>> verdict(summarise_audit(path)).text.split(":")[0]
        'Do not, at 8 tokens'
    """
    heading = "Should I linearize this model?"
    chosen = chosen_line(summary)
    if chosen is None:
        return Point(heading, "No: no method measured has a finite error.")
    length = f"{summary.header.num_tokens:,} tokens"
    if chosen.time_ratio is None:
        answer = "Time was not measured"
    elif chosen.verdict == "no better":
        answer = f"Do not: no method measured is better than averaging the values at {length}"
    elif chosen.time_ratio < 1:
        answer = f"Yes, at {length}, if the error will do"
    elif summary.header.is_causal and chosen.state_numbers < exact_numbers(summary):
        answer = f"Not to save time at {length}, for memory perhaps"
    else:
        answer = f"Do not, at {length}"
    return Point(
        heading, f"{answer}: {chosen.map} has an error of {number(chosen.error.mean)}. {costs(summary, chosen)}"
    )


def chosen_line(summary: AuditSummary) -> Line | None:
    """The method that `verdict` is about; None where no error is finite."""
    finite = [line for line in summary.lines if math.isfinite(line.error.mean)]
    for target in sorted(TARGETS):
        faster = [line for line in finite if line.error.mean <= target and line.time_ratio and line.time_ratio < 1]
        if faster:
            return min(faster, key=lambda line: line.time_ratio or math.inf)
    return min(finite, key=lambda line: line.error.mean, default=None)


def costs(summary: AuditSummary, line: Line) -> str:
    """Time against softmax, numbers against the exact cache, and the length from which the method pays."""
    exact = exact_numbers(summary)
    relation = "less than" if line.state_numbers < exact else "no less than"
    state = f"keeps {line.state_numbers:,} numbers per head, {relation} the {exact:,} of the exact cache"
    if line.time_ratio is None:
        return f"It {state}."
    time = f"the whole model takes {number(line.time_ratio)} × its time with softmax"
    where = "" if line.crossover is None else f" {from_where(line.crossover, summary.header.longest)}"
    return f"With it {time}, at {summary.header.num_tokens:,} tokens and batch 1; it {state}.{where}"


def exact_numbers(summary: AuditSummary) -> int:
    """Numbers per head that exact attention keeps of the audited text."""
    header = summary.header
    return exact_state_numbers(header.num_tokens, head_dim=header.head_dim, value_dim=header.value_dim)
