"""An audit's map of heads: error over averaging's, a table of coloured cells."""

from __future__ import annotations

import math

from linattn_lab.report.audit.summary import AuditSummary


def head_cells(summary: AuditSummary) -> dict[str, list[list[float | None]]]:
    """Error over averaging's of [layer][head] for every map and width, by "map · features"; None where not finite."""
    return {
        f"{line.map} · {line.features:,}": [
            [round(ratio, 4) if math.isfinite(ratio) else None for ratio in layer] for layer in line.head_ratios
        ]
        for line in summary.lines
    }
