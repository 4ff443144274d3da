"""Remarks and numbers as text."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A remark with its heading.

    Attributes:
        heading: what it is about, no full stop.
        text: one or a few sentences.
    """

    heading: str
    text: str


def method_words(label: str, features: int) -> str:
    """A method with its width, where it has a map.

    Example:
        >>> method_words("FavorPlus", 1024), method_words("window 32 + merged 96", 0)
        ('FavorPlus (1,024 features)', 'window 32 + merged 96')
    """
    return f"{label} ({features:,} features)" if features else label


def number(value: float, digits: int = 2) -> str:
    """A number for reading: fixed digits while it is small, two significant ones when it is huge."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.1e}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "layer"), counted(1_024, "token")
        ('1 layer', '1,024 tokens')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
