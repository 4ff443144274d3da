"""The files of `linattn audit`: gone on from after an interruption, and kept aside where another audit follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from linattn.lab.asides import asides, set_aside
from linattn.lab.audit.kept import Kept
from linattn.lab.audit.measuring import Audit
from linattn.lab.audit.planned import Planner
from linattn.lab.audit.records import AUDIT, AuditRow, PlanRow
from linattn.lab.commands.stages import Stages
from linattn.lab.pace import Pace
from linattn.planning import write_plans
from linattn.processes import Processes


@dataclass(frozen=True)
class Files:
    """Where an audit's figures and its plan are kept.

    Attributes:
        records: audit.jsonl.
        plans: plan.json.
    """

    records: Path
    plans: Path

    @property
    def unfinished_plans(self) -> Path:
        """The plans of the first layers."""
        return self.plans.with_suffix(f".partial{self.plans.suffix}")


def measure(
    measured: Audit, planner: Planner | None, files: Files | None, *, again: bool, watch: Stages, pressed: list[int]
) -> None:
    """Write the audit's file, going on from what an earlier run of the same audit has left.

    Of several processes the first has the files, and the others measure their share.
    """
    processes = Processes.of_this_run()
    found = processes.from_first(None if files is None else _begin(measured, files, again=again, watch=watch))
    assert found is not None
    kept = measured.kept(found)
    if kept.rows:
        watch.begin(f"{len(kept.rows):,} figures were measured before and are kept.")
    if planner is not None:
        if files is not None:
            for file in (files.unfinished_plans, files.plans):
                planner.go_on_from(file, [row for row in kept.rows if isinstance(row, PlanRow)])
        planner.plans = processes.from_first(planner.plans)
    total, done = measured.work(kept)
    watch.pace = Pace(total, done=done)
    rows = _rows(measured, kept, planner, files, watch, pressed)
    if files is None:
        deque(rows, maxlen=0)
        return
    AUDIT.extend(files.records, measured.header, kept.rows, rows)
    if planner is not None:
        _write_plans(planner, measured.header.num_layers, files)


def _begin(measured: Audit, files: Files, *, again: bool, watch: Stages) -> list[AuditRow]:
    """What an earlier run has left; the file of another audit is kept aside."""
    found = [] if again else _earlier(measured, files.records, watch)
    if files.records.exists() and (again or not _is_of(measured, files.records)):
        aside = set_aside(files.records)
        why = "" if again else " It is of another model, text, method or version; the page shows the new audit."
        watch.begin(f"What was measured before is now in {aside}.{why}")
    return found


def _rows(
    measured: Audit, kept: Kept, planner: Planner | None, files: Files | None, watch: Stages, pressed: list[int]
) -> Iterator[AuditRow]:
    """The audit's rows, passed on; a plan's file grows with them."""
    written = 0 if planner is None else len(planner.plans)
    for row in measured.rows(kept, watch):
        if pressed:
            raise KeyboardInterrupt
        if planner is not None and len(planner.plans) > written:
            written = len(planner.plans)
            if files is not None:
                write_plans(files.unfinished_plans, planner.plans)
        yield row


def _earlier(measured: Audit, file: Path, watch: Stages) -> list[AuditRow]:
    """Rows of the same audit, from its file or from one that was kept aside."""
    for path in (file, *asides(file)):
        found = AUDIT.unfinished(path)
        if found is not None and found[0] == measured.header:
            if path != file:
                watch.begin(f"Going on from {path}, which is of this audit.")
            return found[1]
    return []


def _is_of(measured: Audit, file: Path) -> bool:
    """Whether a file is of this audit."""
    found = AUDIT.unfinished(file)
    return found is not None and found[0] == measured.header


def _write_plans(planner: Planner, num_layers: int, files: Files) -> None:
    """The plans of all layers under their own name; another audit's are kept aside."""
    planner.plan(num_layers - 1)
    draft = files.unfinished_plans
    write_plans(draft, planner.plans)
    if files.plans.exists() and files.plans.read_bytes() != draft.read_bytes():
        set_aside(files.plans)
    draft.replace(files.plans)
