"""From the file of `linattn reproduce` to its claims, decided or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from linattn.records.texts import Table
from linattn_lab.experiments.experiment import FigureRow, Status
from linattn_lab.experiments.records import CLAIMS, ClaimsHeader, Decision

SOURCES = (
    "Sources: “derivation” is “From Softmax to Performer Linear Attention”, in English and Chinese; “time to perform” "
    "the note of that name (2022); “kernel trick” is “The Kernel Trick: Math Behind Linearization”; “overview” an "
    "overview of linear attention in Chinese; the Performer paper is arXiv 2009.14794."
)
"""What the claims' sources are called for short."""


@dataclass(frozen=True)
class Claim:
    """One claim with its verdict and its figures.

    Attributes:
        decision: the verdict, and all a report needs of the claim.
        rows: its figures, in the order taken.
        command: runs the experiment again.
    """

    decision: Decision
    rows: tuple[FigureRow, ...]
    command: str

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.decision.claim

    @property
    def status(self) -> Status:
        """What the figures say."""
        return self.decision.status


@dataclass(frozen=True)
class ClaimsSummary:
    """A run, summed up.

    Attributes:
        header: its circumstances.
        claims: those decided, in the order of the experiments.
        unfinished: names of those with figures and no verdict yet.
    """

    header: ClaimsHeader
    claims: tuple[Claim, ...]
    unfinished: tuple[str, ...]

    def count(self, status: Status) -> int:
        """How many claims have a status."""
        return Counter(claim.status for claim in self.claims)[status]


def summarise_claims(path: Path) -> ClaimsSummary:
    """Read what `linattn reproduce` has written so far to claims.jsonl; a last line that was cut off is left out.

    Raises:
        ValueError: if the file is none of `linattn reproduce`, or a line of it is damaged.
    """
    try:
        header, records = CLAIMS.so_far(path)
    except ValueError as error:
        raise ValueError(f"{path} is not {CLAIMS.subject}, or it is damaged: {error}") from None
    unknown = sorted({record.claim for record in records} - set(header.configs))
    if unknown:
        raise ValueError(f"{path} has rows of claims that its header lacks, {unknown[0]!r}; measure again")
    decisions = {record.claim: record for record in records if isinstance(record, Decision)}
    rows: dict[str, list[FigureRow]] = {}
    for record in records:
        if isinstance(record, FigureRow):
            rows.setdefault(record.claim, []).append(record)
    option = " --full" if header.setting == "full" else ""
    claims = tuple(
        Claim(decisions[name], tuple(rows.get(name, ())), f"linattn reproduce {name}{option} --again")
        for name in header.configs
        if name in decisions
    )
    return ClaimsSummary(header, claims, tuple(name for name in rows if name not in decisions))


def verdict_table(summary: ClaimsSummary, names: tuple[str, ...]) -> Table:
    """One row per claim: verdict, claim, the figure that decides."""
    rows = tuple(
        (claim.status, f"{claim.decision.sentence}\n{claim.decision.figure}", claim.name)
        for claim in summary.claims
        if claim.name in names
    )
    return Table(("verdict", "claim, and the figure that decides", "name"), rows)
