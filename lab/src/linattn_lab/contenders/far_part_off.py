"""A control beside merged keys: their window without them."""

from __future__ import annotations

from dataclasses import dataclass

from linattn_lab.contenders.windows import SinksAndWindow


@dataclass(frozen=True)
class FarPartOff(SinksAndWindow):
    """The window of merged keys with the first keys beside it, as sinks are always kept, and nothing else.

    Its bytes are those of these keys alone: this is a control, and stands below its budget.
    """

    kind = "far part off"
    source = "a control"

    @property
    def label(self) -> str:
        """Its name with its sizes."""
        return f"{super().label}, far part off"
