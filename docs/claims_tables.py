"""The page of claims, docs/claims.md, and the claims among what fails, from docs/figures.json."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from linattn_lab.experiments import EXPERIMENTS
from site_tables import table

Claims = dict[str, Any]
Decision = dict[str, str]

SOURCES = {
    "derivation": "“From Softmax to Performer Linear Attention”, in English and Chinese",
    "time to perform": "“Time to perform”, a note of 2022",
    "kernel trick": "“The Kernel Trick: Math Behind Linearization”",
    "overview": "An overview of linear attention, in Chinese",
    "Performer paper": "The Performer paper, arXiv 2009.14794",
    "": "Code of the Performer paper, and public implementations of FAVOR+",
}
"""Headings by what a decision's source begins with, the last one of all others."""
_LETTERS = (
    "r or m: random features. D or d: width of queries and keys; Dv: of values. N, n or L: tokens. σ: standard "
    "deviation of the entries of q and k. z = q + k, or x + y, under the scale of softmax; s = |z|²: the variance of "
    "random features grows as e^s. Error: relative, unless the row says otherwise."
)
_STATUS = ("holds", "fails", "undecided")


def claims_page(claims: Claims) -> str:
    """Every claim with its verdict, its reason, its figures, and the name to measure it again by."""
    decisions = claims["decisions"]
    counts = [
        (f"[{heading}](#{_anchor(source)})", *(str(count) for count in _counts(_of(decisions, source))))
        for source, heading in SOURCES.items()
    ]
    parts = [
        "# Claims about linear attention: which hold?",
        "Texts and papers on linear attention make claims. linattn measures each one and says whether it holds.",
        table(("source", "claims", *_STATUS), [*counts, ("**all**", *map(str, _counts(decisions)))]),
        "Measure all claims, or one by its name, again:",
        f"    linattn reproduce --{claims['setting']}\n    linattn reproduce NAME --again",
        f"`make readme` writes this page from `linattn reproduce --{claims['setting']}`, run on {claims['processor']}, "
        f"{claims['threads']} threads, torch {claims['torch']}. A file of `lab/src/linattn_lab/experiments/` has each "
        "claim's setting, figures and the rule that decides.",
        f"Letters: {_LETTERS}",
    ]
    head = ("claim", "verdict", "why, and what was measured", "place in the source", "name")
    for source, heading in SOURCES.items():
        rows = (
            (one["sentence"], f"**{one['status']}**", _why(one), _place(one, source), f"`{one['name']}`")
            for one in _of(decisions, source)
        )
        parts += [f"## {heading} {{#{_anchor(source)}}}", _escaped(head, rows)]
    return "\n\n".join(parts) + "\n"


def claims_words(claims: Claims, names: Iterable[str]) -> str:
    """How many claims there are and how they fare, and the named ones."""
    decisions = claims["decisions"]
    number, *counts = _counts(decisions)
    chosen = set(names)
    rows = ((one["sentence"], _why(one), one["source"]) for one in decisions if one["name"] in chosen)
    return (
        f"Measured by `linattn reproduce --{claims['setting']}`. Of {number} claims {counts[0]} hold, {counts[1]} fail "
        f"and {counts[2]} are undecided. [Claims](../claims.md) has all of them, the letters and the sources. "
        "Among those that fail:\n\n" + _escaped(("claim that fails", "why, and what was measured", "source"), rows)
    )


def _of(decisions: list[Decision], source: str) -> list[Decision]:
    """The claims of one source."""
    named = [name for name in SOURCES if name]
    return [
        one
        for one in decisions
        if (one["source"].startswith(source) if source else not one["source"].startswith(tuple(named)))
    ]


def _counts(decisions: list[Decision]) -> list[int]:
    """How many there are, and how many of each status."""
    counts = Counter(one["status"] for one in decisions)
    return [len(decisions), *(counts[status] for status in _STATUS)]


def _why(one: Decision) -> str:
    """The reason in a sentence, which begins an experiment's docstring, then each figure on a line of its own."""
    experiment = EXPERIMENTS.get(one["name"])
    if experiment is None:
        sys.exit(f"there is no experiment {one['name']!r}; take the figures again with docs/write_tables.py --take")
    reason = (experiment.__doc__ or "").partition("\n")[0]
    figures = one["figure"].replace("; ", ";<br>")
    return f"{reason}<br>*Measured:* {figures}"


def _place(one: Decision, source: str) -> str:
    """Where in its source a claim stands."""
    return one["source"].removeprefix(source).removeprefix(" (arXiv 2009.14794)").removeprefix(", ").strip()


def _anchor(source: str) -> str:
    """The address of a source's heading."""
    return source.lower().replace(" ", "-") or "code"


def _escaped(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of cells that may have bars."""
    return table(head, (tuple(cell.replace("|", "&#124;") for cell in row) for row in rows))
