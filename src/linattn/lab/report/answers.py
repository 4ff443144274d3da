"""Four questions a reader has a minute for, answered from what was measured."""

from __future__ import annotations

from linattn.lab.experiments.experiment import Status
from linattn.lab.report._text import Point, number
from linattn.lab.report.audit.advice import advise, best_line
from linattn.lab.report.audit.summary import AuditSummary, Line
from linattn.lab.report.bench.summary import BenchSummary, conclude
from linattn.lab.report.claims.summary import ClaimsSummary

_TEXTBOOK = "FavorPlus"


def answers(
    audit: AuditSummary | None, claims: ClaimsSummary | None, bench: BenchSummary | None
) -> tuple[Point, Point, Point, Point]:
    """Does it work, how wrong is it, what should I use, how fast is it.

    Args:
        audit: of a model; None if there is none.
        claims: of the texts; None if there are none.
        bench: on some shapes; None if there is none.

    Returns:
        Four remarks; where nothing was measured, the command that would.

    Example:
        >>> answers(None, None, None)[3].text
        'Not measured here: linattn bench.'
    """
    return (
        Point("Does it work?", _works(audit, claims)),
        Point("How wrong is it?", _errors(audit)),
        Point("What should I use?", _choice(audit)),
        Point("How fast is it?", conclude(bench)[0].text if bench else _missing("bench")),
    )


def _works(audit: AuditSummary | None, claims: ClaimsSummary | None) -> str:
    """How wrong a whole model is with the textbook's map and with the best one, and how many claims hold."""
    parts = []
    best = None if audit is None else best_line(audit.lines)
    if audit is not None and best is not None:
        exact, uniform = audit.baselines
        textbook = _textbook(audit)
        if textbook is not None:
            parts.append(
                f"On {audit.header.model} the textbook's random features ({textbook.map}, {textbook.features:,}) are "
                f"{textbook.verdict} than averaging the values."
            )
        parts.append(
            f"With {best.map} the whole model, untrained, keeps a cosine of {number(best.embedding_cosine.mean, 3)} to "
            f"its exact embedding (averaging: {number(uniform.embedding_cosine, 3)}, exact: "
            f"{number(exact.embedding_cosine, 3)})."
        )
    if claims is not None and claims.claims:
        words: dict[Status, str] = {"holds": "borne out", "fails": "refuted", "undecided": "undecided"}
        counts = [f"{claims.count(status)} {word}" for status, word in words.items() if claims.count(status)]
        parts.append(f"Of {len(claims.claims)} claims made for linear attention: {', '.join(counts)}.")
    return " ".join(parts) or _missing("reproduce")


def _errors(audit: AuditSummary | None) -> str:
    """The best method and the textbook's, between both baselines."""
    best = None if audit is None else best_line(audit.lines)
    if audit is None or best is None:
        return _missing("audit")
    textbook = _textbook(audit)
    beside = "" if textbook is None else f", {textbook.map} {number(textbook.error.mean)}"
    return (
        f"Relative error of a head's output on {audit.header.model}: exact attention 0, {best.map} "
        f"{number(best.error.mean)}, averaging the values {number(audit.baselines[1].error)}{beside}."
    )


def _textbook(audit: AuditSummary) -> Line | None:
    """The widest of the maps the texts derive."""
    return max((line for line in audit.lines if line.map == _TEXTBOOK), key=lambda line: line.features, default=None)


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
