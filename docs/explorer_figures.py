"""The site's explorer: what is recorded of an audit's attention rows, and the page that shows it in a frame.

Read by docs/write_tables.py, which writes docs/explorer_frame.html; docs/explorer.json is taken from an audit.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from linattn.records.files import atomic_file
from linattn.records.json_files import Reading, to_json
from linattn_lab.report.audit.explorer import Explorer, explorer, explorer_page
from linattn_lab.report.audit.summary import summarise_audit

RECORDED = Path(__file__).parent / "explorer.json"
# Of the methods of an audit, the best at each size, and the textbook's.
_SHOWN = {
    "window 32 + merged 96",
    "merged 128",
    "Expansion(num_centres=16) + window 32",
    "Expansion(num_centres=16)",
    "Expansion(num_centres=1)",
    "FavorPlus (256 features)",
    "EluPlusOne",
}


def take_explorer(report: Path) -> None:
    """Record what an audit kept of these methods."""
    found = explorer(summarise_audit(report / "audit.jsonl"))
    methods = () if found is None else found.methods
    shown = tuple(one for one in methods if _SHOWN & {one.name, one.name.partition(" (")[0]})
    if found is None or not shown:
        sys.exit(f"{report}/audit.jsonl keeps no attention rows of {', '.join(sorted(_SHOWN))}; run the audit again")
    with atomic_file(RECORDED) as file:
        json.dump(to_json(replace(found, methods=shown)), file, indent=0)
        file.write("\n")


def explorer_frame() -> str:
    """The page that stands in a frame of docs/evidence/explorer.md."""
    values = json.loads(RECORDED.read_text(encoding="utf-8"))
    return explorer_page(Reading(str(RECORDED), "take it from an audit again").record(Explorer, values))
