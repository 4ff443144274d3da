"""What an earlier run of the same audit has measured, and need not be measured again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from linattn_lab.audit.records import AuditRow, HeadRow, LengthsRow, ModelRow, TimeRow, WeightsRow

Kind = Literal["model", "time", "lengths", "weights", "head", "rank"]
# What rows were measured together: their kind, method, width, draw and layer.
Group = tuple[Kind, str, int | None, int, int]
# Kinds of which one row is a whole.
_ALONE = ("model", "time", "lengths", "weights")


class Kept:
    """Rows of an earlier run, by what they were measured of."""

    rows: list[AuditRow]  # those of all that was measured to its end, in order

    def __init__(self, rows: Sequence[AuditRow], *, heads: Sequence[int], ranks: Sequence[int]) -> None:
        """Leave out what an early end has cut short.

        Example:
            >>> from linattn_lab.audit.records import RankRow
            >>> one = RankRow(0, 0, 1, 3, 0.5)
            >>> Kept([one], heads=[2], ranks=[1]).rows  # the second head is missing
            []
        """
        found = Counter(map(_group, rows))
        wanted = {"head": heads, "rank": [len(ranks) * number for number in heads]}
        self._whole = {
            group
            for group, number in found.items()
            if group[0] in _ALONE or (group[-1] < len(heads) and number == wanted[group[0]][group[-1]])
        }
        self.rows = [row for row in rows if _group(row) in self._whole]

    def has(self, kind: Kind, label: str = "", features: int | None = None, *, draw: int = 0, layer: int = 0) -> bool:
        """Whether all rows of a kind are there; of the entire model, its times and lengths the layer is 0."""
        return (kind, label, features, draw, layer) in self._whole


def _group(row: AuditRow) -> Group:
    """What a row was measured with."""
    if isinstance(row, HeadRow):
        return ("head", row.map, row.features, row.draw, row.layer)
    if isinstance(row, ModelRow):
        return ("model", row.map, row.features, row.draw, 0)
    if isinstance(row, TimeRow | LengthsRow):
        return ("time" if isinstance(row, TimeRow) else "lengths", row.map, row.features, 0, 0)
    if isinstance(row, WeightsRow):
        return ("weights", row.map, row.features, 0, row.layer)
    return ("rank", "", None, 0, row.layer)
