"""Questions a reader has a minute for, answered from what was measured in a line or two each."""

from __future__ import annotations

from linattn_lab.experiments.experiment import Status
from linattn_lab.report._text import Point, counted
from linattn_lab.report.audit.paying import longer, verdict
from linattn_lab.report.audit.summary import AuditSummary
from linattn_lab.report.bench.summary import BenchSummary, conclude
from linattn_lab.report.claims.summary import ClaimsSummary


def answers(audit: AuditSummary | None, claims: ClaimsSummary | None, bench: BenchSummary | None) -> tuple[Point, ...]:
    """Should I linearize this model, does it pay on longer texts, how fast is it elsewhere, and do the claims hold."""
    question = "Should I linearize this model?"
    of_model = (Point(question, _missing("audit")),) if audit is None else (verdict(audit), longer(audit))
    return (
        *of_model,
        Point("How fast is it on other shapes?", _speed(bench)),
        Point("Do the claims hold?", _claims(claims)),
    )


def _speed(bench: BenchSummary | None) -> str:
    """The crossover, of which method it is, and on which heads."""
    if bench is None:
        return _missing("bench")
    heads = f"{counted(bench.header.num_heads, 'head')} of width {bench.header.head_dim}"
    words = conclude(bench)[0].text
    return f"{bench.words} on {heads}: {words[0].lower()}{words[1:]}"


def _claims(claims: ClaimsSummary | None) -> str:
    """How many claims hold."""
    if claims is None or not claims.claims:
        return _missing("reproduce")
    words: dict[Status, str] = {"holds": "hold", "fails": "fail", "undecided": "undecided"}
    counts = [f"{claims.count(status)} {word}" for status, word in words.items() if claims.count(status)]
    return f"Of {counted(len(claims.claims), 'claim')} made for linear attention: {', '.join(counts)}."


def _missing(command: str) -> str:
    """What would answer."""
    return f"Not measured here: linattn {command}."
