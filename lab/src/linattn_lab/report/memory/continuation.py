"""How a text goes on by each method: the greedy text after a passage, beside the full cache's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from linattn_lab.kv_audit.names import FULL, NO_BUDGET, UNIFORM
from linattn_lab.kv_audit.records import MemoryRow, PassageRow


@dataclass(frozen=True)
class Written:
    """A greedy text after a passage.

    Attributes:
        method: what keeps the keys and values.
        alike: its first words, where they are the full cache's.
        other: its rest, from where it leaves the full cache's.
    """

    method: str
    alike: str
    other: str


@dataclass(frozen=True)
class Continuation:
    """The greedy text after a passage, by each method.

    Attributes:
        text: kind of the text.
        num_tokens: of the passage.
        budget: in exact keys.
        ending: the passage's last words.
        written: by the full cache, then by each method at the budget, and by uniform attention.
    """

    text: str
    num_tokens: int
    budget: int
    ending: str
    written: tuple[Written, ...]


def continuations(rows: Sequence[MemoryRow], num_tokens: int, budget: int) -> tuple[Continuation, ...]:
    """The first passage of each kind of text at a length, by the baselines and each method at a budget."""
    several: dict[str, list[PassageRow]] = {}
    for row in rows:
        if isinstance(row, PassageRow) and row.written and row.budget in (NO_BUDGET, budget):
            if (row.passage, row.num_tokens) != (0, num_tokens):
                continue
            several.setdefault(row.text, []).append(row)
    return tuple(
        Continuation(text, num_tokens, budget, ones[0].ending, _beside(ones))
        for text, ones in several.items()
        if ones[0].method == FULL
    )


def _beside(rows: Sequence[PassageRow]) -> tuple[Written, ...]:
    """What each method writes, parted where it leaves what the first one writes; uniform attention comes last."""
    full = rows[0].written
    return tuple(
        Written(row.method, *parted(full, row.written)) for row in sorted(rows, key=lambda row: row.method == UNIFORM)
    )


def parted(full: str, other: str) -> tuple[str, str]:
    """The words at the beginning of a text that another one has too, and the rest.

    Example:
        >>> parted("the cat sat", "the car is here")
        ('the', 'car is here')
    """
    words = other.split()
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(full.split(), words, strict=False))))
    return " ".join(words[:same]), " ".join(words[same:])
