"""The file of `linattn audit`: gone on from after an interruption, and kept aside where another audit follows."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from linattn.processes import Processes
from linattn_lab.asides import asides, set_aside
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AUDIT, AuditRow
from linattn_lab.commands.stages import Stages, until_pressed
from linattn_lab.pace import Pace, duration


def measure(measured: Audit, records: Path | None, *, again: bool, watch: Stages, pressed: list[int]) -> None:
    """Write the audit's file, going on from what an earlier run of the same audit has left.

    Of several processes the first has the file, and the others measure their share.
    """
    found = Processes.of_this_run().from_first(
        None if records is None else _begin(measured, records, again=again, watch=watch)
    )
    assert found is not None
    kept = measured.kept(found)
    if kept.rows:
        watch.begin(f"{len(kept.rows):,} figures were measured before and are kept.")
    total, done = measured.work(kept)
    if done < total:
        watch.begin(f"Measuring takes {duration((total - done) * measured.seconds_per_unit)} on this machine.")
    watch.pace = Pace(total, done=done, seconds_per_unit=measured.seconds_per_unit)
    rows = until_pressed(measured.rows(kept, watch), pressed)
    if records is None:
        deque(rows, maxlen=0)
    else:
        AUDIT.extend(records, measured.header, kept.rows, rows)


def _begin(measured: Audit, file: Path, *, again: bool, watch: Stages) -> list[AuditRow]:
    """What an earlier run has left; the file of another audit is kept aside."""
    found, former = [] if again else _earlier(measured, file, watch), AUDIT.unfinished(file)
    is_same = former is not None and former[0] == measured.header
    if file.exists() and (again or not is_same):
        aside = set_aside(file, is_replaced=again)
        why = "" if again else " It is of another model, text, method or version; the page shows the new audit."
        watch.begin(f"What was measured before is now in {aside}.{why}")
    return found


def _earlier(measured: Audit, file: Path, watch: Stages) -> list[AuditRow]:
    """Rows of the same audit, from its file or from one that was kept aside."""
    for path in (file, *asides(file)):
        found = AUDIT.unfinished(path)
        if found is not None and found[0] == measured.header:
            if path != file:
                watch.begin(f"Going on from {path}, which is of this audit.")
            return found[1]
    return []
