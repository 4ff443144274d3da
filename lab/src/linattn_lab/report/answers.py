"""Five questions a reader has a minute for, answered from what was measured."""

from __future__ import annotations

from linattn_lab.experiments.experiment import Status
from linattn_lab.report._text import Point, number
from linattn_lab.report.audit.advice import advise, best_line
from linattn_lab.report.audit.paying import verdict
from linattn_lab.report.audit.summary import AuditSummary, Line
from linattn_lab.report.bench.summary import BenchSummary, conclude
from linattn_lab.report.claims.summary import ClaimsSummary

_TEXTBOOK = "FavorPlus"


def answers(audit: AuditSummary | None, claims: ClaimsSummary | None, bench: BenchSummary | None) -> tuple[Point, ...]:
    """Should I linearize this model, with what, what is lost, how fast is it elsewhere, and do the claims hold.

    Example:
        >>> answers(None, None, None)[3].text
        'Not measured here: linattn bench.'
    """
    return (
        Point("Should I linearize this model?", _missing("audit")) if audit is None else verdict(audit),
        Point("With what?", _choice(audit)),
        Point("What is lost?", _errors(audit)),
        Point("How fast is it on other shapes?", _speed(bench)),
        Point("Do the claims hold?", _claims(claims)),
    )


def _speed(bench: BenchSummary | None) -> str:
    """The crossover, and of which method it is."""
    return f"{bench.words}: {conclude(bench)[0].text}" if bench else _missing("bench")


def _claims(claims: ClaimsSummary | None) -> str:
    """How many claims hold."""
    if claims is None or not claims.claims:
        return _missing("reproduce")
    words: dict[Status, str] = {"holds": "borne out", "fails": "refuted", "undecided": "undecided"}
    counts = [f"{claims.count(status)} {word}" for status, word in words.items() if claims.count(status)]
    return f"Of {len(claims.claims)} claims made for linear attention: {', '.join(counts)}."


def _errors(audit: AuditSummary | None) -> str:
    """The best method and the textbook's, between both baselines, on heads and for the whole model."""
    best = None if audit is None else best_line(audit.lines)
    if audit is None or best is None:
        return _missing("audit")
    exact, uniform = audit.baselines
    textbook = _textbook(audit)
    text = (
        f"Relative error of a head's output on {audit.header.model}: exact attention 0, {best.map} "
        f"{number(best.error.mean)}, averaging the values {number(uniform.error)}. The whole model, untrained, keeps a "
        f"cosine of {number(best.embedding_cosine.mean, 3)} to its exact embedding (averaging: "
        f"{number(uniform.embedding_cosine, 3)}, exact: {number(exact.embedding_cosine, 3)})."
    )
    if textbook is None:
        return text
    return (
        f"{text} The textbook's random features ({textbook.map}, {textbook.features:,}) have "
        f"{number(textbook.error.mean)}: {textbook.verdict} than averaging."
    )


def _textbook(audit: AuditSummary) -> Line | None:
    """The widest of the maps the texts derive."""
    return max((line for line in audit.lines if line.map == _TEXTBOOK), key=lambda line: line.features, default=None)


def _choice(audit: AuditSummary | None) -> str:
    """The method that meets the last target."""
    if audit is None:
        return _missing("audit")
    point = advise(audit).targets[-1]
    return f"{point.heading}: {point.text[0].lower()}{point.text[1:]}"


def _missing(command: str) -> str:
    """What would answer."""
    return f"Not measured here: linattn {command}."
