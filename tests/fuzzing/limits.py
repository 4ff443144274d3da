"""What the documentation says is refused: a refusal passes only where the case's own parameters call for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from fuzzing.maps import DrawnMap
from fuzzing.oracle import MismatchError

Result = TypeVar("Result")


class Limit(NamedTuple):
    """A documented refusal.

    Attributes:
        error: its type.
        words: what its message says.
        certain: False where the case may not reach it, having no tokens.
    """

    error: type[Exception]
    words: str
    certain: bool = True


class RefusedError(Exception):
    """A call was refused as documented, and the case ends there."""


def within(limits: Sequence[Limit], call: Callable[[], Result]) -> Result:
    """The call's result.

    Raises:
        RefusedError: it was refused for one of the limits.
        MismatchError: it was not refused, though one is certain.
    """
    try:
        result = call()
    except Exception as error:
        if any(isinstance(error, limit.error) and re.search(limit.words, str(error)) for limit in limits):
            raise RefusedError from error
        raise
    for limit in limits:
        if limit.certain:
            raise MismatchError(f"not refused, wanted {limit.error.__name__}: {limit.words}")
    return result


def map_limits(drawn: DrawnMap, *, is_causal: bool, has_tokens: bool) -> list[Limit]:
    """What a map refuses before it is fitted."""
    found = []
    if drawn.unfinished:
        found.append(Limit(ValueError, r"call fit\(query, key\)", has_tokens))
    if drawn.from_call and is_causal:
        found.append(Limit(ValueError, "leak the future"))
    return found


def window_limits(
    drawn: DrawnMap, num_queries: int, num_keys: int, window: int | None, *, is_causal: bool
) -> list[Limit]:
    """What a window is refused for."""
    if window is None:
        return []
    found = []
    if not drawn.positive_softmax:
        found.append(Limit(ValueError, "needs a map whose weights share the softmax kernel's scale"))
    if num_keys < num_queries if is_causal else num_keys != num_queries:
        found.append(Limit(ValueError, "a window needs"))
    return found
