"""Suggestions for misspelt words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest to a misspelt one, as an error asks for it; nothing where none is near."""
    exact = {name.lower(): name for name in known}
    nearest = get_close_matches(word.lower(), exact, 1)
    return f", did you mean {exact[nearest[0]]!r}?" if nearest else ""
