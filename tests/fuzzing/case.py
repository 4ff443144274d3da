"""One case: its dice, and what it did, in words."""

from __future__ import annotations

from fuzzing.dice import Dice


class Case:
    """A case while it runs.

    Attributes:
        number: what everything in it is drawn from.
        dice: the draws.
        calls: what was called so far, one line each.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.dice = Dice(number)
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        """Remember a call before it is made."""
        self.calls.append(call)

    def __str__(self) -> str:
        return "\n".join(self.calls)
