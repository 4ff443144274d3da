"""Four questions a reader has a minute for, answered from what was measured."""

from __future__ import annotations

from linattn.lab.experiments.experiment import Status
from linattn.lab.report._text import Point, number
from linattn.lab.report.audit.advice import advise, best_line
from linattn.lab.report.audit.summary import AuditSummary
from linattn.lab.report.bench.summary import BenchSummary, conclude
from linattn.lab.report.claims.summary import ClaimsSummary

_TEXTBOOK = "FavorPlus"


def answers(
    audit: AuditSummary | None, claims: ClaimsSummary | None, bench: BenchSummary | None
) -> tuple[Point, Point, Point, Point]:
    """Does it work, how wrong is it, what should I use, how fast is it.

    Cost: linear in what was measured.

    Args:
        audit: of a model; None if there is none.
        claims: of the texts; None if there are none.
        bench: on some shapes; None if there is none.

    Returns:
        Four remarks; where nothing was measured, the command that would.

    Example:
        >>> answers(None, None, None)[3].text
        'Not measured here: linattn bench.'

    Source: none.
    """
    return (
        Point("Does it work?", _claims(claims)),
        Point("How wrong is it?", _errors(audit)),
        Point("What should I use?", _choice(audit)),
        Point("How fast is it?", conclude(bench)[0].text if bench else _missing("bench")),
    )


def _claims(claims: ClaimsSummary | None) -> str:
    """How the claims fare."""
    if claims is None or not claims.claims:
        return _missing("reproduce")
    words: dict[Status, str] = {"holds": "borne out", "fails": "refuted", "undecided": "undecided"}
    parts = [f"{claims.count(status)} {word}" for status, word in words.items() if claims.count(status)]
    return f"Of {len(claims.claims)} claims made for linear attention: {', '.join(parts)}. The table below says which."


def _errors(audit: AuditSummary | None) -> str:
    """The best method and the textbook's, between both baselines."""
    best = None if audit is None else best_line(audit.lines)
    if audit is None or best is None:
        return _missing("audit")
    uniform = number(audit.baselines[1].error)
    text = (
        f"On {audit.header.model}, of the methods measured {best.map} has the least relative output error, "
        f"{number(best.error.mean)}; exact attention has 0, averaging the values {uniform}."
    )
    textbook = [line for line in audit.lines if line.map == _TEXTBOOK]
    if textbook:
        line = max(textbook, key=lambda one: one.features)
        text += f" The textbook's random features ({_TEXTBOOK}, {line.features:,}): {number(line.error.mean)}."
    return text


def _choice(audit: AuditSummary | None) -> str:
    """One method for all heads, and a plan's where there is one."""
    if audit is None:
        return _missing("audit")
    point = advise(audit).targets[-1]
    text = f"{point.heading}: {point.text[0].lower()}{point.text[1:]}"
    return text if audit.planned is None else f"{text} Head by head: {audit.planned.words()}"


def _missing(command: str) -> str:
    """What would answer."""
    return f"Not measured here: linattn {command}."
