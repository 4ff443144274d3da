"""Whether a method pays: its time beside softmax's, its state beside the exact cache, and from which length on."""

from __future__ import annotations

import math
from collections.abc import Iterable

from linattn_lab.crossover import Crossover
from linattn_lab.report._text import Point, number
from linattn_lab.report.audit.summary import AuditSummary, Line

# Mean errors that are asked for: fair, and good.
TARGETS = (0.3, 0.1)


def verdict(summary: AuditSummary) -> Point:
    """Should this model be linearized, for this length: in one line, for one named method.

    A smaller state is of use where it is kept between calls: an encoder keeps none.

    The method is one that is better than uniform attention, where any is: the fastest of those with an error of at most
    0.1, if one of them is faster than softmax; else of those with at most 0.3; else the one with the least error.
    """
    heading = "Should I linearize this model?"
    chosen = chosen_line(summary)
    if chosen is None:
        return Point(heading, "No: no method measured has a finite error.")
    length = f"{summary.header.num_tokens:,} tokens"
    if chosen.time_ratio is None:
        answer = "Time was not measured"
    elif chosen.verdict == "no better":
        answer = f"Do not: no method measured is better than uniform attention at {length}"
    elif chosen.time_ratio < 1:
        answer = f"Yes, at {length}, if the error will do"
    elif summary.header.is_causal and chosen.state_numbers < summary.exact_numbers:
        answer = f"Not to save time at {length}, for memory perhaps"
    else:
        answer = f"Do not, at {length}"
    time = "" if chosen.time_ratio is None else f" and takes {number(chosen.time_ratio)} × softmax's time"
    return Point(heading, f"{answer}: {chosen.words} has error {number(chosen.error.mean)}{time}.")


def longer(summary: AuditSummary) -> Point:
    """From which length on the method of the verdict pays, and what to do next where it does not pay here."""
    heading, chosen = "And longer texts?", chosen_line(summary)
    crossover = None if chosen is None else chosen.crossover
    if chosen is None or crossover is None:
        return Point(heading, "Not timed at other lengths.")
    text = _from_where(crossover, summary.header.longest)
    pays = chosen.time_ratio is None or chosen.time_ratio < 1 or crossover.always
    return Point(
        heading, f"{chosen.words}: {text[0].lower()}{text[1:]}{'' if pays else _next_step(summary, crossover)}"
    )


def _from_where(found: Crossover, longest: int | None) -> str:
    """From which length on attention is faster, and whether the model takes so many tokens.

    Example:
        >>> _from_where(Crossover(1096.0, (1024, 2048), False, 2048), 512)
        'Attention alone is slower at 1,024 tokens, faster from 2,048 on, and the model takes at most 512.'
    """
    takes = "" if longest is None else f" The model takes at most {longest:,} tokens."
    if found.always:
        return f"Attention alone is faster at this length already.{takes}"
    if found.length is None or found.between is None:
        return f"Attention alone is not faster up to {found.last:,} tokens.{takes}"
    text = "Attention alone is slower at {:,} tokens, faster from {:,} on".format(*found.between)
    if longest is not None and found.length > longest:
        return f"{text}, and the model takes at most {longest:,}."
    return f"{text}.{takes}"


def _next_step(summary: AuditSummary, crossover: Crossover) -> str:
    """A sentence for who has a model that a method does not make faster."""
    header = summary.header
    if crossover.between is not None and crossover.between[1] <= (header.longest or math.inf):
        return f" Audit it there: --tokens {crossover.between[1]}."
    if header.is_causal:
        return f" Bound its KV cache instead: linattn audit {header.model} --budget 512."
    return (
        " Audit a model with a longer context, or bound a language model's KV cache: linattn audit gemma-3-270m "
        "--budget 512."
    )


def chosen_line(summary: AuditSummary) -> Line | None:
    """The method that `verdict` is about; None where no error is finite."""
    lines = [line for line in summary.lines if line.verdict != "no better"] or summary.lines
    for target in sorted(TARGETS):
        met = [line for line in lines if line.error.mean <= target]
        faster = [line for line in met if line.time_ratio and line.time_ratio < 1]
        if faster:
            return min(faster, key=lambda line: line.time_ratio or math.inf)
    return best_line(lines)


def best_line(lines: Iterable[Line]) -> Line | None:
    """The line with the least mean error, or None where no error is finite."""
    finite = [line for line in lines if math.isfinite(line.error.mean)]
    return min(finite, key=lambda line: line.error.mean, default=None)
